"""How a job divides its model over the trainer's GPUs, in one form for both backends."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from millrace.backends import fsdp2, megatron
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.spec import JobSpec


@dataclass(frozen=True)
class Recomputed:
    """What the backward pass computes again, as shares of a layer's forward pass."""

    everything: bool = False
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. `gpus` is the product of tensor, context, pipeline and data."""

    backend: str
    gpus: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 1
    shards: int = 1
    """Ranks over which FSDP2 divides the weights; 1 with Megatron."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage."""
    recomputed: Recomputed = Recomputed()
    offloaded_optimizer: float = 0.0
    """Share of the optimizer that is updated in host memory."""
    moved_optimizer: bool = False
    """Whether the optimizer's state travels to the GPU for an update and back."""
    moved_weights: bool = False
    """Whether weights are in host memory between passes."""
    moved_activations: bool = False

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def lockstep(self) -> bool:
        """Whether data-parallel ranks wait for each other in every micro-batch."""
        return self.expert > 1 or self.shards > 1


def layout_of(spec: JobSpec, shape: ModelShape, gpus: int) -> Layout:
    """The layout of a job's trainer on this number of GPUs. Raises InvalidJob for options that are not valid."""
    if spec.trainer.backend == "megatron":
        return _megatron(spec, shape, gpus)
    options = fsdp2.parse(spec.trainer.backend_options)
    return Layout(
        backend=spec.trainer.backend,
        gpus=gpus,
        context=options.sequence_parallel_size,
        shards=options.fsdp_size or gpus,
        stages=(shape.layers,),
        recomputed=Recomputed(spec.trainer.activation_recompute),
        offloaded_optimizer=float(options.offload_parameters),
        moved_optimizer=options.offload_optimizer and not options.offload_parameters,
        moved_weights=options.offload_parameters,
        moved_activations=options.offload_activations,
    )


def _megatron(spec: JobSpec, shape: ModelShape, gpus: int) -> Layout:
    o = megatron.parse(spec.trainer.backend_options)
    recompute = o.recompute
    whole = recompute.granularity == "full" or (spec.trainer.activation_recompute and recompute.granularity == "none")
    modules = frozenset(recompute.modules) if recompute.granularity == "selective" else frozenset[str]()
    return Layout(
        backend="megatron",
        gpus=gpus,
        tensor=o.tensor_parallel,
        context=o.context_parallel,
        pipeline=o.pipeline_parallel,
        virtual=o.virtual_pipeline,
        expert=o.expert_parallel,
        expert_tensor=o.expert_tensor_size,
        stages=tuple(Topology(gpus, o).stage_layers(shape.layers)),
        recomputed=Recomputed(whole, modules),
        offloaded_optimizer=o.optimizer_offload_fraction,
        moved_optimizer=o.offload_optimizer,
        moved_weights=o.offload_parameters,
    )


class Cause(StrEnum):
    """What a trainer's seconds are spent on."""

    PRODUCTS = "products"
    """Matrix products of the layers."""
    ATTENTION = "attention"
    TOWER = "tower"
    """The tower for images."""
    ELEMENTWISE = "elementwise"
    """Reading and writing activations."""
    LAUNCHES = "launches"
    """Starting the products of experts, one by one."""
    HEAD = "head"
    """The output head: products and logits."""
    TENSOR = "tensor"
    """Exchange between tensor- or context-parallel ranks."""
    EXPERTS = "experts"
    """Exchange of tokens between expert-parallel ranks."""
    PIPELINE = "pipeline"
    """Waiting for other pipeline stages."""
    PACKING = "packing"
    """Waiting for ranks with fuller micro-batches."""
    DATA = "data"
    """Gathering weights and adding gradients over data-parallel ranks."""
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    """Moving weights, optimizer and activations between GPU and host memory."""


Seconds = Mapping[Cause, float]


def added(parts: Iterable[Seconds]) -> dict[Cause, float]:
    """The sum, cause by cause."""
    found: dict[Cause, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def scaled(seconds: Seconds, factor: float) -> dict[Cause, float]:
    return {cause: factor * value for cause, value in seconds.items()}


def total(seconds: Seconds) -> float:
    return sum(seconds.values())


WASTE = 0.001
"""Waiting if ranks meet in every micro-batch, for each data-parallel rank (BENCHMARKS.md, "Packing and balancing":
0.62 % over 8 ranks, 3.4 % over 32)."""
MOST_WASTE = 0.1
EXPERT_SPREAD = 0.8
"""Standard deviation of the tokens of an expert over their mean, in a micro-batch of a trained model. Not measured
here: SGLang reports that spreading DeepSeek-V3's experts evenly over 32 ranks makes prefill 1.49 times as fast."""


def planned_waste(ranks: int) -> float:
    """Share of time that data-parallel ranks wait for each other, with Millrace's plan of micro-batches."""
    return min(MOST_WASTE, WASTE * (ranks - 1))


@dataclass(frozen=True)
class Imbalance:
    packing: Callable[[int], float] = planned_waste
    """Share of time lost if data-parallel ranks meet in every micro-batch, by their number."""
    expert_spread: float = EXPERT_SPREAD
    """0: every expert has the same number of tokens."""

    def fullest(self, experts: int, ranks: int) -> float:
        """Tokens of the fullest of the expert-parallel ranks over their mean: the largest of `ranks` normal values,
        each the mean of the experts of one rank."""
        if ranks <= 1:
            return 1.0
        return 1.0 + self.expert_spread * math.sqrt(2 * math.log(ranks) * ranks / experts)


PLANNED = Imbalance()
