"""Layouts that fit a cluster, the fastest first, and the smallest cluster that a job fits.

A replica's size and the trainer's layout are chosen apart: neither changes the memory of the other. Of a trainer's
layout the settings that save memory are tried together, and the fastest that fits is taken. What is tried is a mapping
from fields of the job spec to values.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.backends.megatron import MegatronOptions
from millrace.engines import ENGINES
from millrace.errors import InvalidJob, InvalidState, refused
from millrace.megatron.architectures.published import PUBLISHED, published_as
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.rules import broken_rules
from millrace.memory.layers import layer_parameters, vocabulary_parameters
from millrace.memory.megatron import HOST_COPIES
from millrace.memory.shape import decoder_shape
from millrace.memory.text import HEADROOM
from millrace.planner.hardware import Gpu
from millrace.planner.plan import Cluster, Plan, make_plan
from millrace.planner.replica import replica_of
from millrace.planner.workload import Workload
from millrace.spec import JobSpec, parse
from millrace.spec.document import merged
from millrace.validation.names import choose

OPTIONS = "trainer.backend_options"
MOST_TENSOR_REPLICA = 64
MOST_CONTEXT = 8
LONG_SEQUENCE = 16_384
"""Tokens of the longest sequence from which on context parallelism is tried."""
FEW_HOSTS, MOST_HOSTS = 16, 128
KEPT_BYTES = 2 + 4
"""Bytes of a parameter's weight and gradient, which every rank that holds it has on its GPU."""
OPTIMIZER_BYTES = 3 * 4
"""Bytes of its optimizer, which the ranks that hold it share."""
Changes = Mapping[str, Any]


def changed(spec: JobSpec, changes: Changes) -> JobSpec:
    """The spec with other values of some fields. Raises InvalidJob."""
    tree: Mapping[str, Any] = spec.model_dump(mode="json")
    for field, value in changes.items():
        nested: Any = value
        for name in reversed(field.split(".")):
            nested = {name: nested}
        tree = merged(tree, nested)
    return parse(tree)


def powers(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def trainer_layouts(spec: JobSpec, shape: ModelShape, gpus: int, gpu: Gpu) -> Iterator[Changes]:
    """How the model may be divided over the trainer's GPUs, as far as the backend and the model allow."""
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    context = powers(min(MOST_CONTEXT, gpus)) if longest >= LONG_SEQUENCE else [1]
    if spec.trainer.backend != "megatron":
        for size in context:
            if gpus % size == 0 and shape.heads % size == 0:
                yield {f"{OPTIONS}.sequence_parallel_size": size}
        return
    for tensor in powers(min(gpus, gpu.gpus_per_host)):
        for pipeline in divisors(gpus // tensor) if gpus % tensor == 0 else []:
            if pipeline > shape.layers:
                break
            for contexts in context:
                yield from _with_experts(shape, gpus, tensor, pipeline, contexts)


def _with_experts(shape: ModelShape, gpus: int, tensor: int, pipeline: int, context: int) -> Iterator[Changes]:
    experts = 1 if shape.experts is None else shape.experts.count
    for expert in divisors(experts):
        options = {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "virtual_pipeline": 1,
            "context_parallel": context,
            "expert_parallel": expert,
            "expert_tensor_parallel": 1 if expert > 1 else None,
            **stage_split(shape, pipeline),
        }
        if not broken_rules(MegatronOptions.model_validate(options), shape, gpus, cuda=True):
            yield {f"{OPTIONS}.{name}": value for name, value in options.items()}


def stage_split(shape: ModelShape, stages: int) -> dict[str, int | None]:
    """Layers of the first and last stage such that the others share the rest evenly and the slowest stage, with the
    output head counted as layers, is as short as can be."""
    names = ("first_stage_layers", "last_stage_layers")
    if stages == 1:
        return dict.fromkeys(names)
    middle = [layer_parameters(shape, layer).dense for layer in range(shape.layers)]
    routed = 0 if shape.experts is None else 3 * shape.hidden * shape.experts.ffn * shape.experts.per_token
    head = shape.vocabulary * shape.hidden / (sum(middle) / shape.layers + routed)
    splits: list[tuple[float, int | None, int | None]] = []
    if shape.layers % stages == 0:
        splits.append((shape.layers / stages + head, None, None))
    for each in {shape.layers // stages, -(-shape.layers // stages)} - {0}:
        last = shape.layers - (stages - 1) * each
        if last >= 1:
            splits.append((max(each, last + head), None, last))
        both = shape.layers - (stages - 2) * each
        if stages > 2 and both >= 2:
            splits.append((max(each, both - both // 2, both // 2 + head), both - both // 2, both // 2))
    if not splits:
        return dict.fromkeys(names)
    _, first, last_layers = min(splits, key=lambda split: split[0])
    return dict(zip(names, (first, last_layers), strict=True))


def savings_of(spec: JobSpec) -> Iterator[Changes]:
    """Settings that save memory, none of them first."""
    if spec.trainer.backend != "megatron":
        for recompute in (False, True):
            for offload in (False, True):
                yield {"trainer.activation_recompute": recompute, f"{OPTIONS}.offload_parameters": offload}
        return
    for fraction in (0.0, 0.5, 1.0):
        for granularity in ("none", "full"):
            yield {
                "trainer.activation_recompute": False,
                f"{OPTIONS}.recompute.granularity": granularity,
                f"{OPTIONS}.optimizer_offload_fraction": fraction,
            }


def replica_sizes(spec: JobSpec, shape: ModelShape, engine: str, gpus: int) -> Iterator[Changes]:
    """Tensor parallelism of a replica, without pipeline stages. An engine without an option for it has one size."""
    names = ENGINES[engine].size_options
    if not names:
        yield {}
        return
    given = spec.rollout.options_of(engine)
    others = {spec.rollout.field_of(engine, name): 1 for name in names[1:] if name in given}
    for size in powers(min(gpus, MOST_TENSOR_REPLICA)):
        if shape.heads % size == 0 and gpus % size == 0:
            yield {spec.rollout.field_of(engine, names[0]): size, **others}


FIELD = "--model"


def model_shape(spec: JobSpec, name: str | None = None) -> ModelShape:
    """The shape of the job's model. `name`: a published model to take instead. Raises InvalidJob if the folder is
    not there and its name is that of no published model."""
    if name is not None:
        if name.lower() not in PUBLISHED:
            raise refused(FIELD, name, "is no model whose sizes are known", choose(name, PUBLISHED))
        return PUBLISHED[name.lower()]
    folder = Path(spec.model.path)
    if folder.is_dir():
        return decoder_shape(folder)
    known = published_as(folder.name)
    if known is None:
        fix = f"give a folder that this machine sees, or --model with one of {', '.join(PUBLISHED)}."
        raise refused("model.path", spec.model.path, "is not on this machine, and no model of this name is known", fix)
    return PUBLISHED[known]


@dataclass(frozen=True)
class Proposal:
    """A layout that fits."""

    changes: Changes
    """Fields of the job spec and their values."""
    plan: Plan

    @property
    def order(self) -> tuple[float, float]:
        """The step's least seconds; if replicas decide those, the trainer's. All proposals have the same replicas,
        so the simulated steps have this order too."""
        return self.plan.least_s, self.plan.training_s


@dataclass(frozen=True)
class Request:
    """What is searched for."""

    spec: JobSpec
    shape: ModelShape
    cluster: Cluster
    work: Workload
    engine: str = "vllm"

    def plan(self, changes: Changes) -> Plan | None:
        """The plan with other settings; None if they do not go together."""
        try:
            return make_plan(changed(self.spec, changes), self.shape, self.cluster, self.work, self.engine)
        except (InvalidJob, InvalidState):
            return None

    def on(self, gpus: int) -> "Request":
        """The same with another number of GPUs of the trainer."""
        return replace(self, cluster=replace(self.cluster, trainer_gpus=gpus))


def proposals(request: Request) -> list[Proposal]:
    """Layouts that fit the cluster, the shortest step first; empty if none fits."""
    return sorted(_fitting(request), key=lambda proposal: proposal.order)


def fewest(request: Request) -> int:
    """The smallest of `counts` GPUs of the trainer for which some layout fits; 0 if none fits."""
    if not request.cluster.colocated and next(_replica(request), None) is None:
        return 0
    tried = counts(request.cluster.gpu.gpus_per_host)
    return next((gpus for gpus in tried if next(_fitting(request.on(gpus)), None) is not None), 0)


def counts(per_host: int) -> list[int]:
    """Numbers of GPUs to try: parts of a host, every number of hosts up to FEW_HOSTS, then steps of an eighth."""
    hosts = list(range(1, FEW_HOSTS + 1))
    while hosts[-1] < MOST_HOSTS:
        hosts.append(hosts[-1] + (1 << (hosts[-1].bit_length() - 1)) // 8)
    return [*(size for size in powers(per_host) if size < per_host), *(per_host * count for count in hosts)]


def _fitting(request: Request) -> Iterator[Proposal]:
    for replica in _replica(request):
        yield from _trainers(request, replica)


def _replica(request: Request) -> Iterator[Changes]:
    """The size of a replica that generates its part of a step soonest; none if no size fits its GPUs."""
    cluster = request.cluster
    gpus = cluster.trainer_gpus if cluster.colocated else cluster.rollout_gpus
    fitting: list[tuple[float, int, Changes]] = []
    for size in replica_sizes(request.spec, request.shape, request.engine, gpus):
        replica = replica_of(changed(request.spec, size), request.shape, request.engine, cluster.gpu)
        if replica.fits:
            fitting.append((cluster.generation(replica, request.work).total, len(fitting), size))
    if fitting:
        yield min(fitting, key=lambda each: each[:2])[2]


def _trainers(request: Request, replica: Changes) -> Iterator[Proposal]:
    bounds = Bounds(request)
    for layout in trainer_layouts(request.spec, request.shape, request.cluster.trainer_gpus, request.cluster.gpu):
        fitting: list[Proposal] = []
        for saving in savings_of(request.spec):
            changes = {**layout, **saving, **replica}
            if bounds.exceeded(changes):
                continue
            plan = request.plan(changes)
            if plan is not None and not plan.limits:
                fitting.append(Proposal(changes, plan))
        if fitting:
            yield min(fitting, key=lambda proposal: proposal.order)


class Bounds:
    """What the trainer's state takes at least, computed without stages and activations: most layouts that do not fit
    are found by it."""

    def __init__(self, request: Request) -> None:
        shape, self._request = request.shape, request
        sizes = [layer_parameters(shape, layer) for layer in range(shape.layers)]
        self._dense = sum(size.dense for size in sizes) + vocabulary_parameters(shape)
        self._experts = sum(size.experts for size in sizes)

    def exceeded(self, changes: Changes) -> bool:
        """Whether these settings cannot fit."""
        spec, cluster = self._request.spec, self._request.cluster
        if spec.trainer.backend != "megatron" or spec.model.lora is not None:
            return False
        tensor, expert = changes[f"{OPTIONS}.tensor_parallel"], changes[f"{OPTIONS}.expert_parallel"]
        of_expert = expert * (changes[f"{OPTIONS}.expert_tensor_parallel"] or tensor)
        kept: float = (
            KEPT_BYTES * (self._dense / tensor + self._experts / of_expert) / changes[f"{OPTIONS}.pipeline_parallel"]
        )
        fraction = changes[f"{OPTIONS}.optimizer_offload_fraction"]
        optimized = (self._dense + self._experts) / cluster.trainer_gpus
        if kept + (1 - fraction) * OPTIMIZER_BYTES * optimized > (1 - HEADROOM) * cluster.gpu.memory:
            return True
        on_host = fraction * (OPTIMIZER_BYTES + HOST_COPIES) * optimized + (kept if cluster.colocated else 0.0)
        return bool(min(cluster.trainer_gpus, cluster.gpu.gpus_per_host) * on_host > cluster.gpu.host_room)
