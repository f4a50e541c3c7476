"""The adapter of one of SGLang's schedulers: its slot in SGLang's LoRA memory pool, which every request uses.

The pool has one tensor of A and one of B for each fused layer, sliced over the ranks as the layer is; the parts of a
fused layer lie one after the other in their rows. The adapter is registered once, without tensors, so its slot is zero;
from then on versions are written to the slot in place, so captured CUDA graphs stay valid. The pool's other slot is for
requests without an adapter, which SGLang captures its graphs with: with one slot they would evict the adapter.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from millrace.errors import InvalidState
from services.rollout.engines.adapter import AdaptedLayer, AdapterShape, AdapterTensors

NAME = "published"
SLOTS = 2
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers that SGLang fuses, with their parts in the order of their rows."""


def lora_reference() -> Any:
    """The adapter as SGLang refers to it, the same in every process. No file is read."""
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=NAME, lora_name=NAME, lora_path="published by the trainer", pinned=False)


@dataclass(frozen=True)
class _Slice:
    """A layer's adapter as this rank holds it."""

    layer: AdaptedLayer
    lora_a: torch.Tensor
    """[rank, inputs of this rank], in the slot."""
    lora_b: torch.Tensor
    """[outputs of this rank, rank], in the slot."""
    inputs: slice
    outputs: slice
    """Columns of A and rows of B that this rank holds."""


class AdapterSlot(AdapterTensors):
    """See `LoadedPart`. Its tensors have the names of the manifest; their memory is SGLang's."""

    def __init__(self, manager: Any, shape: AdapterShape, dtype: torch.dtype) -> None:
        """Registers the adapter with SGLang. `manager` is the scheduler's LoRAManager."""
        super().__init__(shape, str(dtype).removeprefix("torch."))
        config = {
            "peft_type": "LORA",
            "r": shape.rank,
            "lora_alpha": shape.rank,  # a scale of 1: B comes multiplied by the adapter's scale
            "target_modules": shape.kinds,
        }
        added = manager.load_lora_adapter_from_tensors(lora_reference(), {}, config)
        if not added.success:
            raise InvalidState(f"SGLang refused the adapter: {added.error_message}", "set model.lora.merge to true.")
        manager.fetch_new_loras({NAME})
        self._slices = list(_slices(manager, shape))
        held = {each.layer.name for each in self._slices}
        self.unplaced = [layer.name for layer in shape.layers if layer.name not in held]
        """Names of the layers that this rank has no place for."""

    @property
    def loaded(self) -> Mapping[str, torch.Tensor]:
        return {
            name: tensor
            for each in self._slices
            for name, tensor in ((each.layer.lora_a, each.lora_a), (each.layer.lora_b, each.lora_b))
        }

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(tensors)
        for each in self._slices:
            if (lora_a := given.get(each.layer.lora_a)) is not None:
                each.lora_a.copy_(lora_a[:, each.inputs])
            if (lora_b := given.get(each.layer.lora_b)) is not None:
                each.lora_b.copy_(lora_b[each.outputs])


def _slices(manager: Any, shape: AdapterShape) -> Iterator[_Slice]:
    """What this rank holds of each layer's adapter. Layers that it has no place for are left out."""
    pool, adapted = manager.memory_pool, {layer.name: layer for layer in shape.layers}
    slot = pool.uid_to_buffer_id[NAME]
    for layer_id, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            parent, _, kind = name.rpartition(".")
            parts = [adapted.get(f"{parent}.{part}") for part in FUSED.get(kind, (kind,))]
            if any(parts) and kind in pool.A_buffer:
                held = [pool.A_buffer[kind][layer_id][slot], pool.B_buffer[kind][layer_id][slot]]
                yield from _parts(module, parts, held, pool.tp_rank)


def _parts(module: Any, parts: list[AdaptedLayer | None], held: list[torch.Tensor], rank: int) -> Iterator[_Slice]:
    """The parts of one of SGLang's LoRA layers. `held` are its tensors of A and B in the slot. Which rows and columns
    this rank has, SGLang's own slicing says: it is given their numbers."""
    base, (lora_a, lora_b) = module.base_layer, held
    sizes = _output_sizes(base, parts)
    inputs = next(part.inputs for part in parts if part is not None)
    if [size if part is None else part.outputs for part, size in zip(parts, sizes, strict=False)] != sizes:
        return  # SGLang does not fuse the layer in this way
    columns = module.slice_lora_a_weights(torch.arange(inputs)[None], rank)[0]
    rows = module.slice_lora_b_weights(torch.arange(sum(sizes))[:, None], rank)[:, 0]
    first, ranks = 0, len(lora_a) // len(parts)
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        (here,) = ((rows >= first) & (rows < first + size)).nonzero(as_tuple=True)
        if part is not None:
            yield _Slice(
                part,
                lora_a[number * ranks : (number + 1) * ranks],
                lora_b[int(here[0]) : int(here[-1]) + 1],
                slice(int(columns[0]), int(columns[-1]) + 1),
                slice(int(rows[here[0]]) - first, int(rows[here[-1]]) - first + 1),
            )
        first += size


def _output_sizes(base: Any, parts: list[AdaptedLayer | None]) -> list[int]:
    """Outputs of each part of a fused layer on all ranks together. SGLang counts the copies of key and value heads,
    if there are fewer of them than ranks."""
    if len(parts) == 1:
        return [part.outputs for part in parts if part is not None]
    copies = getattr(base, "num_kv_head_replicas", 1)
    return [size if number == 0 else size // copies for number, size in enumerate(base.output_sizes)]
