"""Every tensor whole on rank 0, in Hugging Face terms, gathered box by box from one rank that has each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.megatron import placement as plan
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layers, layout, tensors
from millrace.weights.plans.manifest import Manifest, TensorInfo


@dataclass(frozen=True)
class BoxSource:
    """A box of a tensor, and the rank, chunk and parameter to take it from."""

    rank: int
    chunk: int
    parameter: str
    piece: plan.Piece


@dataclass(frozen=True)
class GatherPlan:
    """Who gives which box of which tensor, in the manifest's order. The same on every rank, worked out without any."""

    tensors: tuple[plan.Tensor, ...]
    sources: Mapping[str, Sequence[BoxSource]]
    kept: frozenset[str]
    """Names of tensors that stay float32 whatever is asked for."""

    @classmethod
    def of(cls, shape: ModelShape, topology: Topology, layers: Layers) -> "GatherPlan":
        """The lowest rank that has a box gives it."""
        wanted = tensors(shape, topology, layers)
        boxes: dict[str, dict[tuple, BoxSource]] = {tensor.name: {} for tensor in wanted}
        for rank in range(topology.world_size):
            for chunk, placements in enumerate(layout(shape, topology, rank, layers)):
                for name, placement in placements.items():
                    for piece in placement.pieces:
                        box = (piece.source, piece.extent)
                        boxes[piece.tensor.name].setdefault(box, BoxSource(rank, chunk, name, piece))
        for tensor in wanted:
            covered = sum(math.prod(extent) for _, extent in boxes[tensor.name])
            if covered != tensor.numel:
                raise ValueError(f"the ranks hold {covered} of the {tensor.numel} numbers of {tensor.name}.")
        # A bias in less than float32 would send tokens to other experts.
        kept = frozenset(t.name for t in wanted if t.name.endswith(shape.names.router_bias))
        return cls(wanted, {name: list(found.values()) for name, found in boxes.items()}, kept)

    def manifest(self, dtype: str) -> Manifest:
        return Manifest(tuple(self._info(tensor, dtype) for tensor in self.tensors))

    def export(
        self, chunks: Sequence[Mapping[str, Tensor]], dtype: str, device: torch.device
    ) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """`chunks` are this rank's parameters by name. A collective: every rank takes every item."""
        rank = dist.get_rank()
        for tensor in self.tensors:
            info = self._info(tensor, dtype)
            kind = getattr(torch, info.dtype)
            whole = torch.empty(tensor.shape, dtype=kind, device=device) if rank == 0 else None
            for source in self.sources[tensor.name]:
                piece = source.piece
                if rank == source.rank:
                    box = chunks[source.chunk][source.parameter].detach()[_slices(piece.target, piece.extent)]
                    if whole is None:
                        dist.send(box.to(kind).contiguous(), 0)
                    else:
                        whole[_slices(piece.source, piece.extent)] = box.to(kind)
                elif whole is not None:
                    received = torch.empty(piece.extent, dtype=kind, device=device)
                    dist.recv(received, source.rank)
                    whole[_slices(piece.source, piece.extent)] = received
            yield info, whole

    def _info(self, tensor: plan.Tensor, dtype: str) -> TensorInfo:
        return TensorInfo(tensor.name, tensor.shape, "float32" if tensor.name in self.kept else dtype)


def _slices(offset: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
