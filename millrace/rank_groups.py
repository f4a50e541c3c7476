"""Which groups of a trainer's ranks lie on one host. Ranks are numbered host by host. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """The hosts of a trainer, with equally many ranks each."""

    ranks: int
    ranks_per_host: int

    @property
    def several(self) -> bool:
        return self.ranks > self.ranks_per_host

    def cross(self, size: int, stride: int = 1) -> bool:
        """Whether a group of `size` ranks, each `stride` after the one before, lies on several hosts. Groups fill runs
        of `size` × `stride` ranks."""
        run, length = size * stride, (size - 1) * stride
        firsts = (start + place for start in range(0, self.ranks, run) for place in range(stride))
        return any(first // self.ranks_per_host != (first + length) // self.ranks_per_host for first in firsts)

    def largest_within(self, size: int, stride: int = 1) -> int:
        """The largest divisor of `size` with which no group lies on several hosts."""
        divisors = (one for one in range(size, 0, -1) if size % one == 0)
        return next(one for one in divisors if not self.cross(one, stride))
