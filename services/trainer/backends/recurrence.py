"""Packed sequences in padded buckets, for what runs over a whole row and may not cross the border of a sequence.

So every backend computes the layers of GatedDeltaNet (arXiv 2412.06464): Qwen3-Next, Qwen3.5 and 3.6. Their convolution
and their recurrence are causal, so padding after the end of a sequence changes nothing in it, and no kernel has to know
of borders. Both are functions of transformers, which take kernels of flash-linear-attention on a GPU.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from millrace.errors import refused

KERNELS = "fla"
"""The module of flash-linear-attention. Without it transformers computes in plain torch, ten times slower or more."""
HOPPER = 9
"""Major compute capability of the GPUs on which Triton compiles a kernel of the backward pass wrongly."""
WRONG_TRITON = ("3.4.0", "3.7.1")
"""From the first of these versions of Triton until before the second the gradient is wrong on Hopper:
flash-linear-attention 0.6 refuses it, earlier ones do not. Its kernel in tilelang takes the place of Triton's."""
WIDEST = 1.25
"""Largest ratio of the longest to the shortest segment in a bucket."""
FEWEST_TOKENS = 64
"""Segments shorter than this share a bucket: for them the number of calls costs more than padding."""


@dataclass(frozen=True)
class Segments:
    """Places of the segments of a packed row in padded buckets."""

    buckets: tuple[Tensor, ...]
    """For each bucket the packed position of every padded place, int64 [segments, longest]; places after the end of a
    segment repeat its first position."""
    starts: Tensor
    """First position of each sequence and the end of the last, int32 [n + 1]."""
    place_p: Tensor
    """The place of each packed position in the buckets, one bucket after the other, int64 [P]."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        """Buckets for a packed row of sequences with these lengths."""
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        place_p = torch.empty(starts[-1], dtype=torch.int64)
        buckets, base = [], 0
        for members in _similar_lengths(lengths):
            longest = lengths[members[-1]]
            offsets = torch.arange(longest)
            starts_b = torch.tensor([starts[member] for member in members])
            lengths_b = torch.tensor([lengths[member] for member in members])
            inside = offsets[None, :] < lengths_b[:, None]
            index = starts_b[:, None] + torch.where(inside, offsets[None, :], 0)
            place_p[index[inside]] = base + inside.view(-1).nonzero().squeeze(1)
            buckets.append(index.to(device))
            base += index.numel()
        return cls(tuple(buckets), torch.tensor(starts, dtype=torch.int32, device=device), place_p.to(device))

    def computed(self, compute: Callable[[Tensor], Tensor], row: Tensor) -> Tensor:
        """What `compute` makes of each segment of a packed row [P, …]: it takes buckets [segments, longest, …] and
        answers with the same first two dimensions. It has to be causal."""
        # index_select, not tensor[index]: the gradient of the latter sorts every index, which took most of a step.
        buckets = [row.index_select(0, index.flatten()).unflatten(0, index.shape) for index in self.buckets]
        outputs = torch.cat([compute(bucket).flatten(0, 1) for bucket in buckets])
        return outputs.index_select(0, self.place_p)


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of segments of similar length, as indices, ordered by length."""
    groups: list[list[int]] = []
    for member in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and lengths[member] <= max(FEWEST_TOKENS, WIDEST * lengths[groups[-1][0]]):
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def check_kernels(device_type: str, path: str, field: str) -> None:
    """Raises InvalidJob if a GPU would compute such layers of the model in `path` without a kernel, or with a wrong
    one."""
    if device_type != "cuda":
        return
    if importlib.util.find_spec(KERNELS) is None:
        reason = "its GatedDeltaNet layers need flash-linear-attention, which is not installed here"
        raise refused(field, path, reason, "install flash-linear-attention on every trainer host.")
    triton = importlib.metadata.version("triton")
    if (
        has_wrong_gradient(torch.cuda.get_device_capability()[0], triton)
        and importlib.util.find_spec("tilelang") is None
    ):
        reason = f"Triton {triton} computes wrong gradients of its GatedDeltaNet layers on this GPU (Hopper)"
        remedy = f"install tilelang, or Triton {WRONG_TRITON[1]} or newer, on every trainer host."
        raise refused(field, path, reason, remedy)


def has_wrong_gradient(capability: int, triton: str) -> bool:
    """Whether Triton of this version compiles the backward pass wrongly for GPUs of this major capability."""
    first, right = WRONG_TRITON
    return capability == HOPPER and first <= TorchVersion(triton) < right
