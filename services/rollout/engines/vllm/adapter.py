"""The adapter of one of vLLM's workers: the one slot of its LoRA layers, which every request uses.

vLLM keeps the A and B of each slot in stacked tensors for every layer, sliced over the ranks as the layer is; a fused
layer has one pair for each of its parts. The adapter is registered once, with zeros; from then on versions are written
to the slot in place, so captured CUDA graphs stay valid. vLLM's own loading of adapters is not used after that: it
would scale B again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from millrace.errors import InvalidState
from services.rollout.engines.adapter import AdaptedLayer, AdapterShape, AdapterTensors
from services.rollout.weights.in_worker.model import loader_name

ADAPTER_ID = 1
SLOT = 0


def lora_request() -> Any:
    """What every request of a job with an adapter is sent with. No file is read: the adapter is registered already."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("published", ADAPTER_ID, "published by the trainer")


@dataclass(frozen=True)
class _SlotLayer:
    """One of vLLM's LoRA layers."""

    layer: Any
    parts: Sequence[AdaptedLayer | None]
    """The layer of the model for each part of the fused layer; None if it has no adapter."""


class AdapterSlot(AdapterTensors):
    """See `LoadedPart`. Its tensors have the names of the manifest; their memory is vLLM's."""

    def __init__(self, lora_manager: Any, shape: AdapterShape, dtype: torch.dtype) -> None:
        """Registers the adapter with vLLM. `lora_manager` is the worker's LRUCacheWorkerLoRAManager."""
        manager = lora_manager._adapter_manager
        super().__init__(shape, str(dtype).removeprefix("torch."))
        self._layers = list(_layers(manager, shape))
        held = {part.name for each in self._layers for part in each.parts if part is not None}
        self.unplaced = [layer.name for layer in shape.layers if layer.name not in held]
        """Names of the layers that this worker has no place for."""
        lora_manager.add_dummy_lora(lora_request(), 1)
        manager.activate_adapter(ADAPTER_ID)
        if manager.lora_index_to_id[SLOT] != ADAPTER_ID:
            raise InvalidState("vLLM put the adapter in another slot.", "set model.lora.merge to true.")

    @property
    def loaded(self) -> Mapping[str, torch.Tensor]:
        """See `LoadedPart`. Ranks of the slot that the adapter does not have stay zero and are left out."""
        rank, found = self._shape.rank, {}
        for each in self._layers:
            stacked = zip(each.parts, each.layer.lora_a_stacked, each.layer.lora_b_stacked, strict=True)
            for part, lora_a, lora_b in stacked:
                if part is not None:
                    found[part.lora_a] = lora_a[SLOT, 0, :rank]
                    found[part.lora_b] = lora_b[SLOT, 0, :, :rank]
        return found

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `LoadedPart`. The layers slice the tensors for their ranks."""
        given = dict(tensors)
        for each in self._layers:
            lora_a = [None if part is None else given.get(part.lora_a) for part in each.parts]
            lora_b = [None if part is None else given.get(part.lora_b) for part in each.parts]
            if any(tensor is not None for tensor in (*lora_a, *lora_b)):
                with _nothing_reset(each.layer):
                    fused = len(each.parts) > 1
                    each.layer.set_lora(SLOT, lora_a if fused else lora_a[0], lora_b if fused else lora_b[0])


def _layers(manager: Any, shape: AdapterShape) -> Iterator[_SlotLayer]:
    """vLLM's LoRA layers that some layer of the adapter belongs to. `manager` is its LoRAModelManager."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = _renames(manager.model)
    names = {layer: replace(layer, name=loader_name(layer.name, manager.model)).lora_a for layer in shape.layers}
    adapted = {parse_fine_tuned_lora_name(name, mapper)[0]: layer for layer, name in names.items()}
    for name, layer in manager.modules.items():
        parts = [adapted.get(part) for part in manager.packed_modules.get(name, [name])]
        if not any(parts) or not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        if len(parts) == len(layer.lora_a_stacked):  # otherwise one adapter would be split over several parts
            yield _SlotLayer(layer, parts)


def _renames(model: Any) -> Any:
    """vLLM's map from the names of the model folder to its own, without those that fuse layers; None if the names
    are the same. Its method has another name in older releases."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper


@contextmanager
def _nothing_reset(layer: Any) -> Iterator[None]:
    """Inside, `set_lora` only copies. Otherwise it would fill the slot with zeros first: every element would be written
    twice, and the parts that are not given would be lost."""
    layer.reset_lora = lambda index: None
    try:
        yield
    finally:
        del layer.reset_lora
