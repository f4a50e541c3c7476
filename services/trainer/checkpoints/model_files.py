"""Reads the weights of a model folder, tensor by tensor."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.errors import InvalidJob

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class ModelFiles:
    """The safetensors files of a folder. Each is opened when it is first needed and closed with the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = _index(folder)

    def __enter__(self) -> "ModelFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors, file after file."""
        return iter(sorted(self._file_of, key=lambda name: (self._file_of[name], name)))

    def has(self, name: str) -> bool:
        """Whether the folder has a tensor of this name."""
        return name in self._file_of

    def whole(self, name: str) -> Tensor:
        """A complete tensor, in host memory."""
        tensor: Tensor = self._file(self._file_of[name]).get_tensor(name)
        return tensor

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """A safetensors slice of the tensor: indexing it reads the values. Raises InvalidJob where the tensor is
        missing or has another shape."""
        if name not in self._file_of:
            raise InvalidJob(
                f"model.path: {self._folder} has no tensor {name}, of shape {shape}, which its config asks for.",
                "give a folder whose weights fit its config.json.",
            )
        stored = self._file(self._file_of[name]).get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise InvalidJob(
                f"model.path: {name} in {self._folder} is {tuple(stored.get_shape())}, the config asks for {shape}.",
                "give a folder whose weights fit its config.json.",
            )
        return stored

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(_opened(self._folder / name))
        return self._open[name]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        fix = "give a Hugging Face folder with safetensors that every trainer host sees at this path."
        raise InvalidJob(f"model.path: {path} cannot be read: {error}.", fix) from error


def _index(folder: Path) -> dict[str, str]:
    """Tensor name → file name."""
    index = folder / INDEX
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    with _opened(folder / SINGLE) as file:
        return dict.fromkeys(file.keys(), SINGLE)
