"""A model as an ordinary Hugging Face folder: safetensors in shards, with config and tokenizer of the job's model. And
an adapter as PEFT stores it: adapter_config.json and adapter_model.safetensors."""

import copy
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from millrace.checkpoints.source import DESCRIPTION
from millrace.data.quantization import unquantized
from millrace.errors import InvalidState
from millrace.hub import HubName
from millrace.sequence_cost import text_entries
from millrace.weights.folder_tensors import predicts_ahead, stored_dtype, stored_name
from millrace.weights.plans.manifest import TensorInfo
from services.trainer.checkpoints.model_files import WEIGHT, ModelFiles, readable
from services.trainer.protocol.adapter import Adapter
from services.trainer.ranks import collectives

Export = Callable[[str], Iterator[tuple[TensorInfo, Tensor | None]]]
"""Yields the tensors in a dtype, whole on rank 0. See `services.trainer.protocol.backend.Backend.export`."""

SHARD_BYTES = 4 << 30
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Entries of a config that name the dtype of the weights; transformers before 4.56 has the second one."""
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
"""Patterns of the files of a model folder that are not weights."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The folder in which a tokenizer has its chat templates besides the first."""


def write_folder(
    folder: Path,
    export: Export,
    model: Path,
    config: Mapping[str, object] | None = None,
    weights: Path | None = None,
) -> None:
    """Gathers a model tensor by tensor and writes it on rank 0, in the dtype of the folder `model`. A collective.

    What is not trained, the config (changed by `config`) and all other files are those of `model`, whose weights are in
    `weights` where they are not in the folder. Raises InvalidState on every rank.
    """
    dtype = dtype_of(model)
    shards = SafetensorsWriter(folder, SHARD_BYTES)
    failure: OSError | SafetensorError | None = None
    given: set[str] = set()
    name_in_folder = names_in(model, weights)
    for info, tensor in export(dtype):
        name = name_in_folder(info.name)
        given.add(name)
        if tensor is not None and failure is None:
            try:
                shards.add(name, tensor.cpu())
            except (OSError, SafetensorError) as error:
                failure = error  # raised once all tensors are gathered: the other ranks have begun to gather
    with collectives.fail_together():
        if dist.get_rank() == 0:
            try:
                if failure is not None:
                    raise failure
                for name, kept in untrained(model, given, weights):
                    shards.add(name, kept)
                shards.finish()
                copy_rest(model, folder)
                if config:
                    tree = json.loads((folder / "config.json").read_text())
                    (folder / "config.json").write_text(json.dumps({**tree, **config}, indent=2))
            except (OSError, SafetensorError) as error:
                raise InvalidState(f"{folder} could not be written: {error}", "free disk space there.") from error


class SafetensorsWriter:
    """Writes tensors to files of about `shard_bytes`, which are named by transformers' rule when the last is
    written."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.names: list[list[str]] = []
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._open: dict[str, Tensor] = {}
        self._held = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor in host memory. Raises OSError, SafetensorError."""
        size = tensor.numel() * tensor.element_size()
        if self._open and self._held + size > self._shard_bytes:
            self._write()
        if not self.names and not self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._open[name] = tensor
        self._held += size
        self._total += size

    def _write(self) -> None:
        save_tensors(self._open, self._folder / f"part-{len(self.names)}")
        self.names.append(list(self._open))
        self._open, self._held = {}, 0

    def finish(self) -> None:
        """Writes the last file and, for several files, the index."""
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


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the permissions that any new file gets here. The library gives 0600 to its own.
    Raises OSError, SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def names_in(model: Path, weights: Path | None = None) -> Callable[[str], str]:
    """A function from the name of a trained tensor to its name in the folder `model`: see `stored_name`."""
    names: frozenset[str] = frozenset()
    if readable(model, weights):
        with ModelFiles(model, weights) as files:
            names = frozenset(files)

    return lambda name: stored_name(name, names)


def untrained(model: Path, given: Collection[str], weights: Path | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the folder `model` that are not among `given`, unchanged: those of a vision tower, for example.
    Quantized ones come unquantized, in the folder's dtype.

    Left out are the language model's head, which is given unless it is tied or replaced by a critic's head, and heads
    that predict several tokens at once, which would not match the trained model any more. Nothing is yielded if the
    folder lacks given tensors: it has them under other names.
    """
    if not readable(model, weights):
        return
    layers = layer_count(model)
    dtype = getattr(torch, dtype_of(model))
    with ModelFiles(model, weights) as files:
        if not set(given) <= {*files, WEIGHT}:
            return
        for name in files:
            if name not in given and "lm_head" not in name.split(".") and not predicts_ahead(name, layers):
                yield name, files.whole(name).to(dtype) if files.is_quantized(name) else files.whole(name)


def layer_count(model: Path) -> int | None:
    """Number of the language model's layers, by the config of its folder."""
    layers: int | None = text_entries(json.loads((model / "config.json").read_text())).get("num_hidden_layers")
    return layers


def dtype_of(model: Path) -> str:
    """Dtype of the weights of a model folder: by its config, which may name it in its text part, else by the weights.
    Of quantized weights that in which they are written."""
    config = unquantized(json.loads((model / "config.json").read_text()))
    named = (part.get(key) for part in (config, text_entries(config)) for key in DTYPE_KEYS)
    return str(next(filter(None, named), None) or stored_dtype(model) or "float32")


def state_dtype(folder: Path, dtype: str) -> None:
    """Writes into a folder's config that its weights have this dtype, which engines load them in."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        part |= {key: dtype for key in DTYPE_KEYS if key in part}
    file.write_text(
        json.dumps(config if any(key in config for key in DTYPE_KEYS) else {**config, "dtype": dtype}, indent=2)
    )


def copy_rest(model: Path, folder: Path) -> None:
    """Copies all files of the folder `model` that are not weights. The config is that of unquantized weights."""
    for pattern in COPIED:
        for file in model.glob(pattern):
            if not file.name.endswith((".safetensors.index.json", ".bin.index.json")) and file.name != DESCRIPTION:
                shutil.copyfile(file, folder / file.name)
    if (templates := model / CHAT_TEMPLATES).is_dir():
        shutil.copytree(templates, folder / CHAT_TEMPLATES, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if (written := unquantized(config)) != config:
        (folder / "config.json").write_text(json.dumps(written, indent=2))


@dataclass(frozen=True)
class GatheredAdapter:
    """A copy of the whole adapter, to be written to such a folder."""

    config: Any
    """A `peft.LoraConfig`."""
    tensors: Mapping[str, Tensor]
    """float32, in host memory, by the names that they have in the file."""

    @classmethod
    def gather(cls, adapter: Adapter, model: str) -> Self | None:
        """The adapter on rank 0, None on other ranks. `model` is the model that it belongs to: a folder, or a name on
        the hub. A collective."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in adapter.export() if tensor is not None}
        if dist.get_rank() != 0:
            return None
        config = copy.copy(adapter.config)
        name = HubName.of_model(model, "model.path")
        config.base_model_name_or_path, config.revision = (name.repository, name.revision) if name else (model, None)
        return cls(config, tensors)

    def write(self, folder: Path) -> None:
        """From any thread. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_tensors(dict(self.tensors), folder / "adapter_model.safetensors")
        except SafetensorError as error:
            raise OSError(f"{folder}: {error}") from error
        self.config.save_pretrained(folder)
