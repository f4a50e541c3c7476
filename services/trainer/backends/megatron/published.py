"""The model as tensors of its folder, of which every rank holds boxes in its parameters: gathered on rank 0 or sent as
boxes for a publication, read from a folder, and with the optimizer's tensors for a checkpoint.

Checkpoints store boxes in the coordinates of the folder, so any topology reads what any other wrote, without gathering
and conversion. That is true for tensor, pipeline and expert parallelism and for the flat shares of the distributed
optimizer.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from millrace.megatron import placement as plan
from millrace.megatron.architectures.shape import ModelShape, Names
from millrace.megatron.placement import Placement, shares
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layers, Layout, layout, tensors, unread
from millrace.weights.folder_tensors import stored_name
from millrace.weights.plans.layout import Layout as BoxLayout
from millrace.weights.plans.layout import Place, row_major_strides
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.backends.megatron.master_weights import OwnedRange
from services.trainer.backends.megatron.optimizer import Updater
from services.trainer.checkpoints.model_files import ModelFiles, check_unread
from services.trainer.protocol.local_tensors import LocalBoxes

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class BoxSource:
    """A box of a tensor, and the rank, chunk and parameter from which it is taken."""

    rank: int
    chunk: int
    parameter: str
    piece: plan.Piece


@dataclass(frozen=True)
class GatherPlan:
    """Which rank gives which box of which tensor, in the manifest's order. Every rank computes the same plan, without
    communication."""

    tensors: tuple[plan.Tensor, ...]
    sources: Mapping[str, Sequence[BoxSource]]
    float32_names: frozenset[str]
    """Names of tensors that stay float32, whichever dtype is asked for."""

    @classmethod
    def of(cls, shape: ModelShape, topology: Topology, layers: Layers) -> "GatherPlan":
        """The plan for the tensors of the model folder."""
        wanted = tensors(shape, topology, layers)
        layouts = [layout(shape, topology, rank, layers) for rank in range(topology.world_size)]
        # A bias in less than float32 would send tokens to other experts.
        float32_names = frozenset(t.name for t in wanted if t.name.endswith(shape.names.router_bias))
        return cls.of_layouts(wanted, layouts, float32_names)

    @classmethod
    def of_layouts(
        cls, wanted: Sequence[plan.Tensor], layouts: Sequence[Layout], float32_names: frozenset[str] = frozenset()
    ) -> "GatherPlan":
        """The plan for tensors of which every rank holds the boxes of its layout. The lowest rank that holds a box
        gives it. Raises ValueError if a part of a tensor is on no rank."""
        boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], BoxSource]] = {
            tensor.name: {} for tensor in wanted
        }
        for rank, chunks in enumerate(layouts):
            for chunk, placements in enumerate(chunks):
                for name, placement in placements.items():
                    for piece in placement.pieces:
                        box = (piece.source, piece.extent)
                        boxes[piece.tensor.name].setdefault(box, BoxSource(rank, chunk, name, piece))
        for tensor in wanted:
            covered = sum(math.prod(extent) for _, extent in boxes[tensor.name])
            if covered != tensor.numel:
                raise ValueError(f"the ranks hold {covered} of the {tensor.numel} numbers of {tensor.name}.")
        return cls(tuple(wanted), {name: list(found.values()) for name, found in boxes.items()}, float32_names)

    def manifest(self, dtype: str, content: Content = Content.MODEL) -> Manifest:
        """Names, shapes and dtypes of the tensors."""
        return Manifest(tuple(self._info(tensor, dtype) for tensor in self.tensors), content)

    def export(
        self, chunks: Sequence[Mapping[str, Tensor]], dtype: str, device: torch.device
    ) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """The tensors, whole on rank 0; None on other ranks. `chunks` are this rank's parameters by name. A collective:
        every rank iterates to the end."""
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
        return TensorInfo(tensor.name, tensor.shape, "float32" if tensor.name in self.float32_names else dtype)


def _slices(offset: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))


VALUE_HEAD = Names().value_head


def check_whole_folder(folder: Path, shape: ModelShape, weights: Path | None, *, by_value: bool) -> None:
    """Raises InvalidJob if the folder stores tensors with values of their own that the model does not take.
    `by_value`: tied ones are compared with those that are read for them."""
    field = "algorithm.critic.path" if shape.value_head else "model.path"
    place = f"{field}: {folder}" if weights is None else f"model.weights: {weights}"
    with ModelFiles(folder, weights) as files:
        check_unread(unread(shape, files), files, folder, place, by_value=by_value)


def read(
    folder: Path, layout: Mapping[str, Placement], dtype: torch.dtype, weights: Path | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of the layout with the values of the folder, or of its checkpoint `weights`, in host memory, one
    at a time. Padding is 0, and so is a value head that the folder does not have.

    Raises InvalidJob if a tensor is missing or has another shape than the config promises.
    """
    with ModelFiles(folder, weights) as files:
        stored_names = frozenset(files)
        for name, placement in layout.items():
            parameter = torch.zeros(placement.shape, dtype=dtype)
            for piece in placement.pieces:
                if piece.tensor.name == VALUE_HEAD and not files.has(VALUE_HEAD):
                    continue
                stored = files.slice_of(stored_name(piece.tensor.name, stored_names), piece.tensor.shape)
                box = tuple(slice(o, o + n) for o, n in zip(piece.source, piece.extent, strict=True))
                target = tuple(slice(o, o + n) for o, n in zip(piece.target, piece.extent, strict=True))
                parameter[target] = stored[box].to(dtype)
            yield name, parameter


ChunkTensors = Sequence[Mapping[str, Tensor]]
"""For each chunk of this rank its parameters and buffers by name."""


@dataclass
class PublishedPart:
    """Implements `services.trainer.protocol.adapter.Published`."""

    content: Content
    gather_plan: GatherPlan
    layout: Layout
    """Where this rank's parameters are in the tensors."""
    tensors: Callable[[], ChunkTensors]
    """The present values, in the same memory at every call."""
    device: torch.device
    merged: Sequence[Mapping[str, Callable[[], Tensor]]] = ()
    """For each chunk the weights that are published with their adapter, by name: each function computes one, float32.
    Empty if there is no adapter to merge."""
    _memory: dict[str, Memory] = field(default_factory=dict)
    """Keyed by dtype."""

    def manifest(self, dtype: str) -> Manifest:
        return self.gather_plan.manifest(dtype, self.content)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        present: ChunkTensors = self.tensors()
        if self.merged:
            present = [MergedTensors(*chunk) for chunk in zip(present, self.merged, strict=True)]
        return self.gather_plan.export(present, dtype, self.device)

    def shards(self, dtype: str) -> Memory:
        present = self.tensors()
        if dtype not in self._memory:
            self._memory[dtype] = shards(present, self.layout, self.manifest(dtype), self.merged or [{}] * len(present))
        return self._memory[dtype]


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a chunk by name, some of them computed. The one that was last asked for is kept, since all tensors
    of a fused weight are asked for one after the other."""

    def __init__(self, tensors: Mapping[str, Tensor], merged: Mapping[str, Callable[[], Tensor]]) -> None:
        self._tensors = tensors
        self._merged = merged
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._merged:
            return self._tensors[name]
        if self._last[0] != name:
            self._last = (name, self._merged[name]())
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def shards(
    chunks: Sequence[Mapping[str, Tensor]],
    placements: Layout,
    manifest: Manifest,
    merged: Sequence[Mapping[str, Callable[[], Tensor]]],
) -> Memory:
    """Views of the parameters that train, without a copy. `chunks` are this rank's parameters by name, and `merged` the
    weights among them that are computed when they are sent."""
    number = {tensor.name: i for i, tensor in enumerate(manifest.tensors)}
    places: list[Place] = []
    buffers: list[Tensor] = []
    computed: dict[int, Callable[[], Tensor]] = {}
    for held, placed, of_chunk in zip(chunks, placements, merged, strict=True):
        for name, placement in placed.items():
            strides = row_major_strides(placement.shape)
            for piece in placement.pieces:
                start = sum(t * s for t, s in zip(piece.target, strides, strict=True))
                where = Place(number[piece.tensor.name], piece.source, piece.extent, len(buffers), start, strides)
                places.append(where)
            if name in of_chunk:
                computed[len(buffers)] = of_chunk[name]
            buffers.append(held[name].detach())
    return Memory(manifest, BoxLayout.of(places, manifest), buffers, computed)


def named_tensors(chunks: Sequence[nn.Module], layout: Layout) -> Iterator[tuple[Tensor, Placement]]:
    """Parameters and buffers of chunks (without data-parallel wrappers), with their places in the model folder."""
    for chunk, placements in zip(chunks, layout, strict=True):
        tensors = {**dict(chunk.named_buffers()), **dict(chunk.named_parameters())}
        yield from ((tensors[name], placement) for name, placement in placements.items())


def state(
    chunks: Sequence[nn.Module], layout: Layout, updater: Updater, *, tied_copy: Tensor | None
) -> dict[str, LocalBoxes]:
    """`model.<name>` in float32, and `exp_avg.<name>` and `exp_avg_sq.<name>` after the first update; `<name>` is that
    in the model folder. `tied_copy` is an output head that is a copy of the embedding of another stage."""
    placements = {id(tensor): placement for tensor, placement in named_tensors(chunks, layout)}
    found: dict[str, LocalBoxes] = {}
    seen = set()
    for owned in updater.owned_ranges():
        placement, saved_here = placements[id(owned.parameter)], owned.parameter is not tied_copy
        seen.add(id(owned.parameter))
        for kind, flat in _states(owned):
            _add(found, kind, placement, owned.first, flat, saved_here)
    trained = {id(p) for chunk in chunks for p in chunk.parameters() if p.requires_grad}
    for tensor, placement in named_tensors(chunks, layout):
        if id(tensor) not in trained | seen:
            _add(found, "model", placement, 0, tensor.detach().view(-1), saved_here=tensor is not tied_copy)
    return found


def _states(owned: OwnedRange) -> Iterator[tuple[str, Tensor]]:
    yield "model", owned.master
    for name in MOMENTS:
        flat = owned.moment(name)
        if flat is not None:
            yield name, flat


def _add(
    found: dict[str, LocalBoxes], kind: str, placement: Placement, first: int, flat: Tensor, saved_here: bool
) -> None:
    for share in shares(placement, first, first + flat.numel()):
        name = f"{kind}.{share.tensor.name}"
        boxes = found.setdefault(name, LocalBoxes(tuple(share.tensor.shape), flat.dtype, saved_here=saved_here))
        view = flat.as_strided(share.extent, share.strides, flat.storage_offset() + share.start)
        boxes.parts[share.source] = view
