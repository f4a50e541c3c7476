"""The tensors that an export of a checkpoint consists of, under the names and in the parts of the model folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millrace.errors import InvalidState
from millrace.weights.loader.stored import pieces, published_dtype, stored_tensors
from millrace.weights.unread import predicts_ahead
from services.trainer.checkpoints import huggingface
from services.trainer.checkpoints.box_files import BoxReader
from services.trainer.checkpoints.description import Description
from services.trainer.checkpoints.foreign.module_names import empty_module
from services.trainer.checkpoints.model_files import ModelFiles
from services.trainer.checkpoints.tensor_names import WEIGHTS
from services.trainer.protocol.adapter import LORA_A, LORA_B, MAGNITUDE, AdapterSettings, merged, tensor_name


@dataclass(frozen=True)
class Exported:
    """What is exported."""

    description: Description
    stored: BoxReader
    folder: Path
    """The job's model folder."""
    weights: Path | None
    """The checkpoint with the model's weights, where they are not in the folder."""
    dtype: str
    trust: bool
    """Whether Python code in the folder may run."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the checkpoint, and those of the model that are not trained. Raises InvalidState,
        InvalidJob."""
        if self.description.adapter is not None:
            yield from self._merged(AdapterSettings(**self.description.adapter))
            return
        given, dtype = set[str](), getattr(torch, self.dtype)
        for name, tensor in self._trained():
            given.add(name)
            yield name, tensor
        for name, tensor in huggingface.untrained(self.folder, given, self.weights):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoints of FSDP2 have the tensors as the transformers module does (all experts of a layer in one), those
        of Megatron as the folder does."""
        stored, dtype = self.stored, self.dtype
        left = {name.removeprefix(WEIGHTS) for name in stored.names if name.startswith(WEIGHTS)}
        untrained: dict[str, tuple[tuple[int, ...], str]] = {}
        if (module := empty_module(self.folder, self.trust)) is not None:
            for name, like in stored_tensors(module):
                trained, kept = name in left, published_dtype(module, name, dtype)
                left.discard(name)
                for piece, part in pieces(module, name, stored.whole(WEIGHTS + name) if trained else like).items():
                    if trained or piece in left:
                        left.discard(piece)
                        values = part if trained else stored.whole(WEIGHTS + piece)
                        yield piece, values.to(getattr(torch, kept)).contiguous()
                    else:
                        untrained[piece] = (tuple(part.shape), kept)
        for name in sorted(left):
            yield name, stored.whole(WEIGHTS + name).to(getattr(torch, dtype))
        with ModelFiles(self.folder, self.weights) as files:
            for name, (extent, kept) in untrained.items():
                yield name, files.slice_of(name, extent)[:].to(getattr(torch, kept))

    def _merged(self, settings: AdapterSettings) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model, those of layers with an adapter merged with it. Linear layers have the same names
        in the module, where the adapter was trained, and in the folder."""
        stored, dtype = self.stored, getattr(torch, self.dtype)
        ending, layers = f".{LORA_A}.default.weight", huggingface.layer_count(self.folder)
        trained = [name.removeprefix(WEIGHTS) for name in stored.names if name.startswith(WEIGHTS)]
        adapted = {name.removesuffix(ending) for name in trained if name.endswith(ending)}
        with ModelFiles(self.folder, self.weights) as files:
            if lacking := [layer for layer in sorted(adapted) if not files.has(f"{layer}.weight")]:
                what = f"{self.folder} has no tensor {lacking[0]}.weight, for which the checkpoint has an adapter."
                raise InvalidState(what, "name the folder of the job's model with --model.")
            for name in files:
                if predicts_ahead(name, layers):
                    continue
                whole, layer = files.whole(name), name.removesuffix(".weight")
                if layer in adapted:
                    lora_a, lora_b = (stored.whole(WEIGHTS + tensor_name(layer, part)) for part in (LORA_A, LORA_B))
                    magnitude = stored.whole(WEIGHTS + tensor_name(layer, MAGNITUDE)) if settings.dora else None
                    whole = merged(whole, lora_a, lora_b, settings.scale, magnitude)
                yield name, whole.to(dtype).contiguous() if whole.is_floating_point() else whole
