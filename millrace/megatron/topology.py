"""Sizes of the parallel dimensions, each rank's coordinates in them, and the layers of each pipeline stage.

The order of the dimensions is megatron-core's (`tp-cp-ep-dp-pp`, tensor-parallel neighbours next to each other), so
that a rank's layout can be computed without starting it. Torch-free.
"""

from dataclasses import dataclass

from millrace.backends.megatron import MegatronOptions


@dataclass(frozen=True)
class Coordinates:
    """One rank's index in each dimension. Expert layers divide the same ranks differently."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Topology:
    """The ranks of one job. Raises ValueError if the sizes do not divide `world_size`."""

    world_size: int
    options: MegatronOptions

    def __post_init__(self) -> None:
        if self.world_size % self.options.ranks_multiple:
            raise ValueError(f"{self.world_size} ranks are not a multiple of {self.options.ranks_multiple}.")

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.options.ranks_of_a_model

    @property
    def expert_data_parallel(self) -> int:
        return self.world_size // self.options.ranks_of_all_experts

    def coordinates(self, rank: int) -> Coordinates:
        o = self.options
        rest, tensor = divmod(rank, o.tensor_parallel)
        rest, context = divmod(rest, o.context_parallel)
        pipeline, data = divmod(rest, self.data_parallel)
        rest, expert_tensor = divmod(rank, o.expert_tensor_size)
        rest, expert = divmod(rest, o.expert_parallel)
        expert_data = rest % self.expert_data_parallel
        return Coordinates(tensor, context, data, pipeline, expert_tensor, expert, expert_data)

    def layers_of(self, stage: int, chunk: int, layers: int) -> range:
        """The model's layers in one chunk of one stage. With several chunks, stages take turns: chunk 0 of every
        stage comes before chunk 1 of any."""
        chunks = self.options.virtual_pipeline
        sizes = [count // chunks for count in self.stage_layers(layers)]
        start = chunk * sum(sizes) + sum(sizes[:stage])
        return range(start, start + sizes[stage])

    def stage_layers(self, layers: int) -> list[int]:
        """How many layers each stage has."""
        o = self.options
        first, last, stages = o.first_stage_layers, o.last_stage_layers, o.pipeline_parallel
        if stages == 1:
            return [layers]
        middle = stages - (first is not None) - (last is not None)
        share = (layers - (first or 0) - (last or 0)) // middle if middle else 0
        head = [] if first is None else [first]
        tail = [] if last is None else [last]
        return [*head, *[share] * middle, *tail]
