"""Writes the distributed checkpoints of `millrace export`: their form, and the files, one tensor of the model after
the other, in one process."""

import json
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from millrace.backends.megatron import MegatronOptions
from millrace.checkpoints.index import FILE, Part
from millrace.checkpoints.megatron_names import EXPERTS, LAYERS, PADDED, SAME
from millrace.checkpoints.source import DESCRIPTION, TORCH_DIST
from millrace.errors import InvalidState
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, layout


@dataclass(frozen=True)
class Target:
    """Where a box of a tensor of the model is written."""

    part: Part
    shape: tuple[int, ...]
    """Shape of the whole stored tensor."""
    aliases: tuple[str, ...] = ()
    """Other keys under which the same values are stored."""


Form = Mapping[str, Sequence[Target]]
"""Name of a tensor of the model folder → where its boxes are written."""


def megatron_form(shape: ModelShape) -> Form:
    """A dist-checkpoint as Megatron-Core loads it where it is given no metadata: experts are stacked in one tensor, and
    so are the layers of a model whose layers are alike. Norms have Transformer Engine's names and those of Megatron's
    own layers. The vocabulary is not padded."""
    stacked = shape.experts is None or all(shape.experts.layers)
    found: dict[str, list[Target]] = defaultdict(list)
    (parameters,) = layout(shape, Topology(1, MegatronOptions()), 0, LOCAL)
    for parameter, placement in parameters.items():
        keys, leading = _keys(parameter, shape, stacked)
        for piece in placement.pieces:
            behind = piece.extent if parameter in PADDED else placement.shape
            stored = (*(at for at, _ in leading), *piece.target)
            along = (*(None for _ in leading), *range(len(piece.extent)))
            part = Part(keys[0], piece.source, piece.extent, stored, along)
            found[piece.tensor.name].append(Target(part, (*(n for _, n in leading), *behind), tuple(keys[1:])))
    return found


def module_states(form: Form) -> list[str]:
    """Keys of the states that Megatron-Core has besides the parameters of a module (`_extra_state`), one for each layer
    and expert: a model asks for them when it is loaded. They are empty unless the module computes in FP8."""
    found: dict[str, None] = {}
    for part, shape, aliases in ((t.part, t.shape, t.aliases) for targets in form.values() for t in targets):
        stacked = [dim for dim, along in enumerate(part.along) if along is None]
        offset = ".".join(str(part.stored[dim]) for dim in stacked) or "0"
        size = ".".join(str(shape[dim]) for dim in stacked) or "1"
        for key in (part.key, *aliases):
            module = key.rpartition(".")[0]
            modules = [module, module.replace("linear_proj", "core_attention")]
            found |= {f"{each}._extra_state/shard_{offset}_{size}": None for each in modules}
    return list(found)


def _keys(parameter: str, shape: ModelShape, stacked: bool) -> tuple[list[str], list[tuple[int, int]]]:
    """The keys of a parameter, and its index in each dimension along which parameters are stacked, with its size."""
    if not parameter.startswith(LAYERS):
        return [parameter], []
    number, _, rest = parameter.removeprefix(LAYERS).partition(".")
    before, leading = (LAYERS, [(int(number), shape.layers)]) if stacked else (f"{LAYERS}{number}.", [])
    if rest.startswith(EXPERTS) and shape.experts is not None:
        expert, _, linear = rest.removeprefix(EXPERTS).partition(".")
        return [f"{before}mlp.experts.experts.{linear}"], [*leading, (int(expert), shape.experts.count)]
    return [before + name for name in (rest, SAME.get(rest)) if name is not None], leading


FILE_BYTES = 4 << 30
"""A new file begins where one has this size."""


class CheckpointWriter:
    """Writes the tensors that it is given where `form` says. A tensor that `form` does not have is refused."""

    def __init__(self, folder: Path, form: Form, *, megatron: bool) -> None:
        """`megatron`: a dist-checkpoint of Megatron-Core rather than one of torch."""
        self._folder = folder
        self._form = form
        self._megatron = megatron
        self._left = set(form)
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: BinaryIO | None = None
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor of the model in host memory. Raises OSError, and InvalidState for a tensor without a
        place."""
        if name not in self._form:
            what = f"{name} has no place in this format, which is for language models."
            raise InvalidState(what, "export it with --format huggingface.")
        self._left.discard(name)
        for target in self._form[name]:
            part = target.part
            box = tensor[tuple(slice(o, o + n) for o, n in zip(part.offset, part.extent, strict=True))]
            lasting = [along for along in part.along if along is not None]
            order = [*lasting, *(dim for dim in range(box.dim()) if dim not in lasting)]
            extent = [1 if along is None else part.extent[along] for along in part.along]
            self._write(target, box.permute(order).reshape(extent))

    def _write(self, target: Target, values: Tensor) -> None:
        place = self._append(values.clone(memory_format=torch.contiguous_format))  # without the rest of its storage
        chunk = ChunkStorageMetadata(torch.Size(target.part.stored), values.shape)
        for key in (target.part.key, *target.aliases):
            known = self._tensors.setdefault(
                key, TensorStorageMetadata(TensorProperties(values.dtype), torch.Size(target.shape), [])
            )
            assert isinstance(known, TensorStorageMetadata)
            known.chunks.append(chunk)
            self._places[MetadataIndex(key, target.part.stored)] = place

    def _append(self, value: Any) -> _StorageInfo:
        """Writes a value behind the others, and returns where."""
        if self._file is None or self._file.tell() >= FILE_BYTES:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"__0_{self._count}.distcp").open("wb")
            self._count += 1
        first = self._file.tell()
        torch.save(value, self._file)
        return _StorageInfo(Path(self._file.name).name, first, self._file.tell() - first)

    def finish(self) -> None:
        """Writes the index. Raises OSError, and InvalidState if tensors are missing."""
        if self._left:
            what = f"the checkpoint has no tensor {min(self._left)}, and lacks {len(self._left)} in all."
            raise InvalidState(what, "name the folder of the job's model with --model.")
        if self._megatron:
            empty = self._append([None])
            for key in module_states(self._form):
                self._tensors[key] = BytesStorageMetadata()
                self._places[MetadataIndex(key)] = empty
        self.close()
        storage = StorageMeta()
        metadata = Metadata(self._tensors, storage_data=self._places, storage_meta=storage, version="1.0.0")
        with (self._folder / FILE).open("wb") as file:
            pickle.dump(metadata, file)
        if self._megatron:
            torch.save({}, self._folder / "common.pt")
            about = {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1}
            about |= {"common_backend": "torch", "common_backend_version": 1}
            (self._folder / DESCRIPTION).write_text(json.dumps(about))

    def close(self) -> None:
        """Closes the open file."""
        if self._file is not None:
            self._file.close()
            self._file = None
