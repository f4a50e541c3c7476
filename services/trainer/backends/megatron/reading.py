"""Reading a model folder: of each safetensors file only the boxes that this rank holds."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.megatron.placement import Placement
from millrace.megatron.shape import Names

VALUE_HEAD = Names().value_head
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read(folder: Path, layout: Mapping[str, Placement], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of the layout as the folder has it, in host memory, padding zero, and a value head that the folder
    has not. One is in memory at a time.

    Raises InvalidJob where a tensor is missing or has another shape than the config promises.
    """
    with ExitStack() as stack:
        files = _Files(folder, stack)
        for name, placement in layout.items():
            parameter = torch.zeros(placement.shape, dtype=dtype)
            for piece in placement.pieces:
                if piece.tensor.name == VALUE_HEAD and not files.has(VALUE_HEAD):
                    continue
                stored = files.slice_of(piece.tensor.name, piece.tensor.shape)
                box = tuple(slice(o, o + n) for o, n in zip(piece.source, piece.extent, strict=True))
                target = tuple(slice(o, o + n) for o, n in zip(piece.target, piece.extent, strict=True))
                parameter[target] = stored[box].to(dtype)
            yield name, parameter


class _Files:
    """The folder's safetensors files, each opened once and when it is first needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._open: dict[str, Any] = {}
        self._file_of = _index(folder)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
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
        mend = "give a Hugging Face folder with safetensors that every trainer host sees at this path."
        raise InvalidJob(f"model.path: {path} cannot be read: {error}.", mend) from error


def _index(folder: Path) -> dict[str, str]:
    """Tensor name → file name."""
    index = folder / INDEX
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    with _opened(folder / SINGLE) as file:
        return dict.fromkeys(file.keys(), SINGLE)
