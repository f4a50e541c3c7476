"""Model and optimizer as tensors of the model folder, for checkpoints.

Every weight, moment and buffer is described in Hugging Face coordinates, in which this rank holds boxes of it.
Checkpoints store boxes, so any topology reads what any other wrote, without gathering and conversion. That is true for
tensor, pipeline and expert parallelism and for the flat shares of the distributed optimizer.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from millrace.megatron.placement import Placement, shares
from millrace.megatron.weights import Layout
from services.trainer.backends.megatron.master_weights import OwnedRange
from services.trainer.backends.megatron.optimizer import Updater
from services.trainer.protocol.local_tensors import LocalBoxes

MOMENTS = ("exp_avg", "exp_avg_sq")


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
