"""The model as an ordinary Hugging Face folder: safetensors in shards, with config and tokenizer of the job's model."""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from millrace.errors import InvalidState
from millrace.weights.plans.manifest import TensorInfo
from services.trainer.checkpoints.model_files import INDEX, SINGLE, ModelFiles
from services.trainer.checkpoints.value_head import WEIGHT
from services.trainer.ranks import collectives

Export = Callable[[str], Iterator[tuple[TensorInfo, Tensor | None]]]
"""Of a dtype: the tensors one after the other, whole on rank 0. See `backends.Backend.export`."""

SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
"""Everything of the model folder but its weights."""
LAYER = re.compile(r"(?:^|\.)(?:model|language_model)\.layers\.(\d+)\.")
"""In the name of a tensor: which layer of the language model it is of."""


def write_folder(folder: Path, export: Export, model: Path, config: Mapping[str, Any] | None = None) -> None:
    """Gathers tensor by tensor and writes on rank 0, in the dtype that the folder `model` is in, with what is not
    trained, its config, changed by `config`, and all else beside its weights. All ranks call it. Raises InvalidState on
    all."""
    dtype = dtype_of(model)
    shards = SafetensorsWriter(folder, SHARD_BYTES)
    failure: OSError | SafetensorError | None = None
    given: set[str] = set()
    for info, tensor in export(dtype):
        given.add(info.name)
        if tensor is not None and failure is None:
            try:
                shards.add(info.name, tensor.cpu())
            except (OSError, SafetensorError) as error:
                failure = error  # told once the other ranks have given all that they are asked for
    with collectives.fail_together():
        if dist.get_rank() == 0:
            try:
                if failure is not None:
                    raise failure
                for name, kept in untrained(model, given):
                    shards.add(name, kept)
                shards.finish()
                copy_rest(model, folder)
                if config:
                    tree = json.loads((folder / "config.json").read_text())
                    (folder / "config.json").write_text(json.dumps({**tree, **config}, indent=2))
            except (OSError, SafetensorError) as error:
                raise InvalidState(f"{folder} could not be written: {error}", "make room there.") from error


class SafetensorsWriter:
    """Files of about `shard_bytes`; numbered by transformers' rule once their number is known."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.names: list[list[str]] = []
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._open: dict[str, Tensor] = {}
        self._held = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._open and self._held + size > self._shard_bytes:
            self._write()
        if not self.names and not self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._open[name] = tensor
        self._held += size
        self._total += size

    def _write(self) -> None:
        save_file(self._open, self._folder / f"part-{len(self.names)}", metadata={"format": "pt"})
        self.names.append(list(self._open))
        self._open, self._held = {}, 0

    def finish(self) -> None:
        if self._open:
            self._write()
        count = len(self.names)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.names):
            final = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"part-{number}").rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def untrained(model: Path, given: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """What the folder `model` has beside the tensors `given`, as it is there: a vision tower, say. Not the language
    model's head, which is given unless it is tied or a critic's takes its place, nor heads that predict several tokens
    at once: they would fall behind. Nothing where the folder lacks some that are given: it has them by other names.
    """
    if not any((model / file).is_file() for file in (INDEX, SINGLE)):
        return
    config = json.loads((model / "config.json").read_text())
    layers = {**config, **(config.get("text_config") or {})}.get("num_hidden_layers")
    with ModelFiles(model) as files:
        if not set(given) <= {*files, WEIGHT}:
            return
        for name in files:
            if name not in given and not _dropped(name, layers):
                yield name, files.whole(name)


def _dropped(name: str, layers: int | None) -> bool:
    parts, layer = name.split("."), LAYER.search(name)
    beyond = layer is not None and layers is not None and int(layer[1]) >= layers
    return beyond or "lm_head" in parts or any(part.startswith("mtp") for part in parts)


def dtype_of(model: Path) -> str:
    """Of a model folder."""
    config = json.loads((model / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def copy_rest(model: Path, folder: Path) -> None:
    """All but the weights."""
    for pattern in COPIED:
        for file in model.glob(pattern):
            if not file.name.endswith(".safetensors.index.json") and not file.name.endswith(".bin.index.json"):
                shutil.copyfile(file, folder / file.name)
