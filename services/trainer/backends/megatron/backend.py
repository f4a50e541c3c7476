"""The megatron backend: policy, optimizer and reference behind the protocol of a backend."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from millrace.backends.megatron import TESTED_MEGATRON, MegatronOptions, parse
from millrace.errors import InvalidJob
from millrace.megatron.architectures.shape import ModelShape, sequence_cost
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layout, layout
from millrace.memory.ledger import Part
from millrace.spec import JobSpec
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.backends.megatron.adapters import (
    AdapterMode,
    AdapterPlan,
    PolicyAdapter,
    ScaledParameters,
    gather_plan,
    in_folder,
    merged_weights,
)
from services.trainer.backends.megatron.experts import LoadMeter, auxiliary_loss, install, replayed_share
from services.trainer.backends.megatron.model.chunks import ChunkPlan, Policy, RestingParameters, build_chunks
from services.trainer.backends.megatron.model.configuration import configuration, dispatcher
from services.trainer.backends.megatron.model.layers import layers
from services.trainer.backends.megatron.optimizer import Updater, wrap
from services.trainer.backends.megatron.published import (
    ChunkTensors,
    GatherPlan,
    PublishedPart,
    check_whole_folder,
    read,
    state,
)
from services.trainer.backends.megatron.schedule import Pipeline
from services.trainer.backends.tower import Images, Tower
from services.trainer.protocol.backend import Critic, DataParallel, LossFn, Output, TokenScores
from services.trainer.protocol.local_tensors import LocalBoxes, NamedTensors
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.ranks.world import hosts_of_ranks


@dataclass(frozen=True)
class ModelSetup:
    """The shape of a model, and how it is divided over the ranks."""

    shape: ModelShape
    topology: Topology
    device: torch.device
    adapter: AdapterPlan | None = None
    """The adapter that is trained in place of the weights; None if these are trained."""
    images: Images | None = None
    """In a job with images; the tower on ranks of the first stage."""

    @property
    def options(self) -> MegatronOptions:
        return self.topology.options

    def layout(self, rank: int) -> Layout:
        """Which part of which tensor of the model folder each parameter of a rank is."""
        return layout(self.shape, self.topology, rank, layers())

    def trained_layout(self, rank: int) -> Layout:
        """The same of the parameters that are trained: those of the adapter, if there is one."""
        return self.layout(rank) if self.adapter is None else self.adapter.layout(self.layout(rank))

    def layers(self) -> list[range]:
        """The layers of the model that each chunk of this rank has."""
        stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), range(self.options.virtual_pipeline)
        return [self.topology.layers_of(stage, chunk, self.shape.layers) for chunk in chunks]


class MegatronBackend:
    """Implements `services.trainer.protocol.backend.Backend`."""

    critic: Critic | None = None

    def __init__(self, spec: JobSpec, setup: ModelSetup) -> None:
        self.device = setup.device
        self.data_parallel = _data_parallel()
        self.cost = sequence_cost(setup.shape, 0 if setup.adapter is None else setup.adapter.parameters)
        self.adapter: PolicyAdapter | None = None
        self._adapter_mode = AdapterMode()
        self._setup = setup
        self._layout = setup.layout(dist.get_rank())
        self._trained_layout = setup.trained_layout(dist.get_rank())
        self._gather_plan = GatherPlan.of(setup.shape, setup.topology, layers())
        self._folder = Path(spec.model.path)
        self._weights = None if spec.model.weights is None else Path(spec.model.weights)
        dtype = getattr(torch, spec.trainer.dtype)
        self._chunks = self._build_chunks(dtype, train_router=setup.options.experts.train_router)
        if (plan := setup.adapter) is not None:
            self._adapter_mode = plan.attach(self._chunks, self._layout)
            self.adapter = self._policy_adapter(plan)
        self._mark_split(self._chunks)
        self._load = LoadMeter(self._chunks) if setup.shape.experts is not None else None
        self._last_expert_metrics: dict[str, float] = {}
        self._passed: list[MicroBatch] = []
        """Micro-batches of the backward passes since the last update."""
        wrapped = wrap(self._chunks, setup.options)
        self._updater = Updater(wrapped, spec.trainer.optimizer, setup.options)
        self._fill(self._chunks, self._updater)
        if setup.adapter is not None:
            self._fill_adapter(setup.adapter)
        self._policy = Pipeline(wrapped, setup.options, self.device, setup.images)
        self._reference: ReferencePolicy | None = None
        if spec.algorithm.kl is not None and self.adapter is None:
            chunks = self._build_chunks(dtype, train_router=False)
            self._fill(chunks, None)
            own = parse(spec.trainer.of("reference").backend_options)
            self._reference = ReferencePolicy(chunks, replace(setup, topology=replace(setup.topology, options=own)))
        self.parameters = self._count()
        self._stale = False
        current = partial(self._current, partial(_tensors, self._chunks))
        merged = [] if self.adapter is None else [merged_weights(chunk) for chunk in self._chunks]
        self._resting = RestingParameters(self._chunks) if setup.options.offload_parameters else None
        self.rest()
        self._whole = PublishedPart(Content.MODEL, self._gather_plan, self._layout, current, self.device, merged)

    @property
    def updates(self) -> int:
        return self._updater.updates

    def logprobs(
        self, microbatches: Sequence[MicroBatch], *, temperature: float, reference: bool = False
    ) -> list[Tensor]:
        self._update_parameters()
        if reference and self.adapter is not None:
            with self._adapter_mode.off():
                return self.logprobs(microbatches, temperature=temperature)
        if reference:
            assert self._reference is not None, "a reference policy is kept only for a job with algorithm.kl"
            return self._reference.logprobs(microbatches, temperature)
        scored = self._policy.forward(microbatches, temperature=temperature)
        self.rest()
        return [scores_2r[0] for scores_2r in scored]

    def scores(self, microbatches: Sequence[MicroBatch], *, temperature: float) -> list[TokenScores]:
        self._update_parameters()
        scored = self._policy.forward(microbatches, temperature=temperature)
        self.rest()
        return [TokenScores.of(scores_2r) for scores_2r in scored]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], loss_fn: LossFn[Output], *, temperature: float, more: bool = False
    ) -> list[Output]:
        self._update_parameters()
        if not self._updater.has_gradients:
            self._passed.clear()
            if self._load is not None:
                self._load.clear()
        self._passed += microbatches
        outputs: dict[int, Output] = {}

        def score(number: int, scores_kr: Tensor) -> Tensor:
            loss, outputs[number] = loss_fn(microbatches[number], TokenScores.of(scores_kr))
            return loss

        with self._adapter_mode.training(), self._updater.adding_gradients(more=more):
            scored = self._policy.backward(microbatches, score, temperature=temperature)
        if not more:
            self._last_expert_metrics = self._expert_metrics(self._passed)
            self._passed.clear()
        for number, scores_kr in enumerate(scored):
            if number not in outputs:  # another pipeline stage computed the loss; the same scores give the same output
                outputs[number] = loss_fn(microbatches[number], TokenScores.of(scores_kr))[1]
        return [outputs[number] for number in range(len(microbatches))]

    def gradient_norm(self) -> float:
        return self._updater.norm()

    def prepare_update(self) -> None:
        self._updater.make_moments()

    def optimizer_step(self, *, lr: float, gradient_scale: float) -> None:
        self._updater.step(lr=lr, gradient_scale=gradient_scale)
        self.rest()

    def zero_gradients(self) -> None:
        self._updater.zero()
        self.rest()

    def rest(self) -> None:
        if self._resting is not None and not self._updater.has_gradients:
            self._resting.rest()

    def manifest(self, dtype: str) -> Manifest:
        return self._whole.manifest(dtype)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        return self._whole.export(dtype)

    def shards(self, dtype: str) -> Memory | None:
        return self._whole.shards(dtype)

    def _current(self, tensors: Callable[[], ChunkTensors]) -> ChunkTensors:
        self._update_parameters()
        return tensors()

    def state(self) -> NamedTensors:
        self._update_parameters()
        return self._state()

    def prepare_state(self, updates: int) -> NamedTensors:
        self._wake()
        self._updater.make_room(updates)
        # The caller is about to write the master weights; the parameters are copied from them later.
        self._stale = True
        return self._state()

    def abandon_pass(self) -> None:
        self._updater.zero()

    def held(self) -> dict[Part, list[Tensor]]:
        policy = [tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        if self._resting is not None:
            policy += self._resting.host_copies
        trained, tower = self._updater.held(), [] if self._tower is None else self._tower.weights
        if self.adapter is not None:
            adapter = [tensor for tensor in policy if tensor.requires_grad]
            frozen = [tensor for tensor in policy if not tensor.requires_grad]
            return {
                Part.WEIGHTS: [*frozen, *tower],
                Part.ADAPTER: [*adapter, *(each for part in trained.values() for each in part)],
            }
        reference = [] if self._reference is None else self._reference.tensors()
        return {Part.WEIGHTS: [*policy, *tower], **trained, Part.REFERENCE: reference}

    @property
    def _tower(self) -> Tower | None:
        return self._setup.images if isinstance(self._setup.images, Tower) else None

    @property
    def tower_flops(self) -> float:
        return 0.0 if self._tower is None else self._tower.flops

    def metrics(self) -> dict[str, float]:
        return self._last_expert_metrics

    def _expert_metrics(self, microbatches: Sequence[MicroBatch]) -> dict[str, float]:
        """Metrics of the experts in the passes that have just ended, with the same names on every rank."""
        experts, asked = self._setup.shape.experts, self._setup.options.experts
        if experts is None or self._load is None:
            return {}
        metrics = {**self._load.metrics(), "moe/replayed": replayed_share(microbatches)}
        if asked.load_balancing != "none":
            metrics["moe/aux_loss"] = auxiliary_loss(asked.load_balancing, sum(experts.layers), len(microbatches))
        return metrics

    def _wake(self) -> None:
        if self._resting is not None:
            self._resting.wake()

    def _update_parameters(self) -> None:
        """Has the parameters on the device, as they are after the last update: copies the master weights to them if
        these were written from outside."""
        self._wake()
        if self._stale:
            self._updater.master_weights_changed()
            self._stale = False

    def _state(self) -> dict[str, LocalBoxes]:
        last, tied_copy = self._chunks[-1], None
        if self._setup.shape.tied and self._setup.options.pipeline_parallel > 1 and last.post_process:
            tied_copy = last.output_layer.weight
        return state(self._chunks, self._trained_layout, self._updater, tied_copy=tied_copy)

    def _build_chunks(self, dtype: torch.dtype, *, train_router: bool) -> list[Policy]:
        shape, options = self._setup.shape, self._setup.options
        images, chosen = self._setup.images is not None, dispatcher(options, hosts_of_ranks())
        config = configuration(shape, options, dtype, dispatcher=chosen, images=images)
        chunks = build_chunks(ChunkPlan(shape, self._setup.topology, config, self.device))
        for chunk, placements in zip(chunks, self._layout, strict=True):
            _check_layout(chunk, placements)
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(train_router or not name.endswith("router.weight"))
        if shape.experts is not None and not shape.value_head:
            install(chunks, self._setup.layers(), shape.experts)
        return chunks

    def _policy_adapter(self, plan: AdapterPlan) -> PolicyAdapter:
        ranks = range(self._setup.topology.world_size)
        layouts = [in_folder(plan, self._setup.trained_layout(rank)) for rank in ranks]
        gathered, own = gather_plan(plan, layouts), layouts[dist.get_rank()]
        current = partial(self._current, partial(_tensors, self._chunks))
        scaled = partial(self._current, ScaledParameters(self._chunks, plan.settings.scale))
        base = PublishedPart(Content.BASE, self._gather_plan, self._layout, current, self.device)
        alone = PublishedPart(Content.ADAPTER, gathered, own, scaled, self.device)
        trained = PublishedPart(Content.ADAPTER, gathered, own, current, self.device)
        return PolicyAdapter(plan, {Content.BASE: base, Content.ADAPTER: alone}, trained)

    def _mark_split(self, chunks: list[Policy]) -> None:
        """Marks the trained parameters that differ between tensor-parallel ranks: the norm of the gradients counts the
        others once. Megatron marks them when it draws random weights, which is skipped here."""
        topology, rank = self._setup.topology, dist.get_rank()
        first = rank - topology.coordinates(rank).tensor
        group = range(first, first + self._setup.options.tensor_parallel)
        peers = [self._setup.trained_layout(peer) for peer in group if peer != rank]
        for index, (chunk, placements) in enumerate(zip(chunks, self._trained_layout, strict=True)):
            parameters = dict(chunk.named_parameters())
            for name in placements.keys() & parameters.keys():
                split = any(peer[index].get(name) != placements[name] for peer in peers)
                setattr(parameters[name], "tensor_model_parallel", split)  # noqa: B010

    @torch.no_grad()
    def _fill(self, chunks: list[Policy], updater: Updater | None) -> None:
        """Reads this rank's part of the model folder into the parameters and, as float32, into the master weights."""
        with collectives.fail_together():
            shape, by_value = self._setup.shape, dist.get_rank() == 0
            check_whole_folder(self._folder, shape, self._weights, by_value=by_value)
            for chunk, placements in zip(chunks, self._layout, strict=True):
                _copy(read(self._folder, placements, torch.float32, self._weights), chunk, updater)

    @torch.no_grad()
    def _fill_adapter(self, plan: AdapterPlan) -> None:
        """Gives the adapter its first values."""
        with collectives.fail_together():
            for chunk, values in zip(self._chunks, plan.first_values(self._trained_layout), strict=True):
                _copy(values, chunk, self._updater)

    def _count(self) -> int:
        """Number of trainable parameters of the whole policy."""
        if self._setup.adapter is not None:
            return self._setup.adapter.parameters
        biases = self._gather_plan.float32_names
        return sum(tensor.numel for tensor in self._gather_plan.tensors if tensor.name not in biases)


class ReferencePolicy:
    """The policy as it was loaded, without gradients; in host memory between its uses if the job says so."""

    def __init__(self, chunks: list[Policy], setup: ModelSetup) -> None:
        self._modules = nn.ModuleList(chunks).requires_grad_(False).eval()
        self._pipeline = Pipeline(chunks, setup.options, setup.device, setup.images)
        self._device = setup.device
        self._rest_device = torch.device("cpu") if setup.options.offload_reference else setup.device
        self._modules.to(self._rest_device)

    def tensors(self) -> list[Tensor]:
        return [*self._modules.parameters(), *self._modules.buffers()]

    def logprobs(self, microbatches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        self._modules.to(self._device)
        try:
            return [scores_2r[0] for scores_2r in self._pipeline.forward(microbatches, temperature=temperature)]
        finally:
            self._modules.to(self._rest_device)


def _copy(values: Iterable[tuple[str, Tensor]], chunk: nn.Module, updater: Updater | None) -> None:
    """Copies values to the parameters and buffers of a chunk and, as float32, to the master weights."""
    ranges = {} if updater is None else {id(owned.parameter): owned for owned in updater.owned_ranges()}
    tensors = {**dict(chunk.named_buffers()), **dict(chunk.named_parameters())}
    for name, value in values:
        tensors[name].copy_(value)
        if owned := ranges.get(id(tensors[name])):
            owned.master.copy_(value.reshape(-1)[owned.first : owned.first + owned.master.numel()])


def _tensors(chunks: Sequence[nn.Module]) -> ChunkTensors:
    return [{**dict(chunk.named_buffers()), **dict(chunk.named_parameters())} for chunk in chunks]


def _data_parallel() -> DataParallel:
    size = parallel_state.get_data_parallel_world_size()
    group = parallel_state.get_data_parallel_group() if size > 1 else None
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return DataParallel(parallel_state.get_data_parallel_rank(), size, group, stages)


def _check_layout(chunk: nn.Module, placements: Mapping[str, Any]) -> None:
    """Checks that the weight map and the model have the same parameters. Raises InvalidJob."""
    built = {name: tuple(t.shape) for name, t in chunk.state_dict().items() if not name.endswith("_extra_state")}
    mapped = {name: placement.shape for name, placement in placements.items()}
    if built != mapped:
        wrong = sorted(set(built.items()) ^ set(mapped.items()))
        raise InvalidJob(
            f"megatron-core built {len(wrong)} parameters that the weight map does not know so: {wrong[:4]} …",
            f"install megatron-core {' or '.join(TESTED_MEGATRON)}.",
        )
