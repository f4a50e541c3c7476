"""Figures of GPUs and of the hosts that they are in: published ones of a few kinds, or those of a user's YAML file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from millrace.errors import InvalidJob, refused
from millrace.planner import constants
from millrace.validation.fields import StrictModel
from millrace.validation.mistakes import options
from millrace.validation.names import choose

FIELD = "--gpu"
GIGA, TERA, GIB = 1e9, 1e12, float(1 << 30)


class Gpu(StrictModel):
    """One kind of GPU in one kind of host. Rates are those of one direction, and of one GPU if it does not say
    otherwise."""

    memory_gib: float = Field(ge=1, le=10_000)
    """Memory that programs see, GiB."""
    bf16_tflops: float = Field(ge=1, le=1_000_000)
    """Published rate of dense matrix products in bfloat16, 10¹² FLOP/s."""
    memory_gb_s: float = Field(ge=1, le=1_000_000)
    """Bandwidth of its memory, GB/s."""
    link_gb_s: float = Field(ge=0.1, le=100_000)
    """Bandwidth to the other GPUs of its host, GB/s."""
    network_gb_s: float = Field(50.0, ge=0.001, le=100_000)
    """Bandwidth to other hosts: its share of the host's network cards, GB/s."""
    host_link_gb_s: float = Field(64.0, ge=0.1, le=10_000)
    """Bandwidth to the memory of its host, GB/s."""
    product_share: float = Field(0.8, ge=0.01, le=1.0)
    """Share of `bf16_tflops` that a product of large matrices reaches."""
    gpus_per_host: int = Field(8, ge=1, le=1024)
    host_memory_gib: float = Field(2048.0, ge=1, le=1_000_000)
    """Memory of a host, GiB."""
    host_memory_gb_s: float = Field(600.0, ge=1, le=100_000)
    """Bandwidth of a host's memory, GB/s."""
    price_per_hour: float = Field(ge=0.0, le=10_000)
    """Price of one GPU for an hour, in any currency."""

    @property
    def memory(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * GIB

    @property
    def product_rate(self) -> float:
        """FLOP/s of a product of large matrices."""
        return self.product_share * self.bf16_tflops * TERA

    @property
    def memory_rate(self) -> float:
        """Bytes a second of its memory."""
        return self.memory_gb_s * GIGA

    @property
    def host_room(self) -> float:
        """Bytes of a host's memory that services may use."""
        return (1 - constants.HOST_ROOM) * self.host_memory_gib * GIB


KINDS: dict[str, Gpu] = {
    "h20": Gpu(
        memory_gib=95.6, bf16_tflops=148, memory_gb_s=4000, link_gb_s=450, product_share=0.92, price_per_hour=1.8
    ),
    "h100": Gpu(
        memory_gib=79.6, bf16_tflops=989, memory_gb_s=3350, link_gb_s=450, product_share=0.75, price_per_hour=3.0
    ),
    "h200": Gpu(
        memory_gib=139.8, bf16_tflops=989, memory_gb_s=4800, link_gb_s=450, product_share=0.8, price_per_hour=3.8
    ),
    "a100": Gpu(
        memory_gib=79.3,
        bf16_tflops=312,
        memory_gb_s=2039,
        link_gb_s=300,
        network_gb_s=25,
        host_link_gb_s=32,
        product_share=0.85,
        host_memory_gb_s=400,
        price_per_hour=1.8,
    ),
    "b200": Gpu(
        memory_gib=179.1, bf16_tflops=2250, memory_gb_s=8000, link_gb_s=900, product_share=0.72, price_per_hour=5.5
    ),
}
"""Published figures of the SXM forms. `product_share` of the H200 is measured (BENCHMARKS.md, 771 to 802 TFLOP/s); for
other GPUs it is assumed, and so are hosts, network cards and prices: give your own in a file."""


def hardware(given: str) -> Gpu:
    """The figures of a known kind, or those in a YAML file. Raises InvalidJob for a name that is neither, and for
    mistakes in the file."""
    if given.lower() in KINDS:
        return KINDS[given.lower()]
    path = Path(given)
    if not path.exists():
        fix = f"{choose(given, KINDS)[:-1]}, or give a YAML file with the figures of another GPU: docs/planner.md."
        raise refused(FIELD, given, "is no known kind of GPU and no file", fix)
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise InvalidJob(f"{FIELD}: {given}: cannot be read: {error}.", "give a YAML file.") from error
    if not isinstance(tree, Mapping):
        raise refused(FIELD, given, "is not a mapping of figures", "write `memory_gib: 80` and so on: docs/planner.md.")
    return options(Gpu, tree, FIELD)


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
