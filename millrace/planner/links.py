"""Seconds of the exchanges between GPUs. Ranks of a group are neighbours: a group that is no larger than a host lies in
one."""

from dataclasses import dataclass

from millrace.planner import constants
from millrace.planner.hardware import GIGA, Gpu


@dataclass(frozen=True)
class Links:
    """The links of a GPU, with what messages reach of them, bytes a second."""

    gpu: Gpu

    @property
    def within(self) -> float:
        return constants.LINK_SHARE * self.gpu.link_gb_s * GIGA

    @property
    def across(self) -> float:
        """Bytes a second to other hosts: this GPU's share of the network cards."""
        return constants.NETWORK_SHARE * self.gpu.network_gb_s * GIGA

    @property
    def to_host(self) -> float:
        return constants.HOST_LINK_SHARE * self.gpu.host_link_gb_s * GIGA

    def gathered(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather that gives `size` bytes to each rank, or of the reduce-scatter that takes them.
        `stride`: distance between neighbours of the group."""
        if ranks <= 1:
            return 0.0
        rate = self.within if ranks * stride <= self.gpu.gpus_per_host else self._ring(ranks, stride)
        return size * (ranks - 1) / ranks / rate

    def _ring(self, ranks: int, stride: int) -> float:
        """A ring over several hosts leaves a host once for all its members there: their cards work together."""
        members = max(1, self.gpu.gpus_per_host // stride)
        return min(self.within, self.across * min(members, ranks))

    def exchanged(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-to-all in which each rank sends `size` bytes in all, evenly to all ranks."""
        if ranks <= 1:
            return 0.0
        inside = min(ranks, max(1, self.gpu.gpus_per_host // stride))
        return size * ((inside - 1) / ranks / self.within + (ranks - inside) / ranks / self.across)

    def summed(self, size: float, ranks: int) -> float:
        """Seconds of an all-reduce of `size` bytes over the workers of an engine."""
        if ranks <= 1:
            return 0.0
        inside = ranks <= self.gpu.gpus_per_host
        least = constants.REDUCE_S if inside else constants.REDUCE_ACROSS_HOSTS_S
        return least + 2 * self.gathered(size, ranks)
