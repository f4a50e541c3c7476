"""Layouts that fit a cluster, the fastest first, and the smallest cluster that a job fits.

A replica's size and the trainer's layout are chosen apart: neither changes the memory of the other. Of a trainer's
layout the settings that save memory are tried together, and the fastest that fits is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from millrace.errors import InvalidJob, InvalidState
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.layers import layer_parameters, vocabulary_parameters
from millrace.memory.megatron import HOST_COPIES
from millrace.memory.text import HEADROOM
from millrace.planner.candidates import OPTIONS, Changes, changed, powers, replica_sizes, savings_of, trainer_layouts
from millrace.planner.plan import Cluster, Plan, make_plan
from millrace.planner.replica import replica_of
from millrace.planner.workload import Workload
from millrace.spec import JobSpec

FEW_HOSTS, MOST_HOSTS = 16, 128
KEPT_BYTES = 2 + 4
"""Bytes of a parameter's weight and gradient, which every rank that holds it has on its GPU."""
OPTIMIZER_BYTES = 3 * 4
"""Bytes of its optimizer, which the ranks that hold it share."""


@dataclass(frozen=True)
class Proposal:
    """A layout that fits."""

    changes: Changes
    """Fields of the job spec and their values."""
    plan: Plan

    @property
    def order(self) -> tuple[float, float]:
        """The step's least seconds; where replicas decide those, the trainer's. All proposals have the same replicas,
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
        """The plan with other settings; None where they do not go together."""
        try:
            return make_plan(changed(self.spec, changes), self.shape, self.cluster, self.work, self.engine)
        except (InvalidJob, InvalidState):
            return None

    def on(self, gpus: int) -> "Request":
        """The same with another number of GPUs of the trainer."""
        return replace(self, cluster=replace(self.cluster, trainer_gpus=gpus))


def proposals(request: Request) -> list[Proposal]:
    """Layouts that fit the cluster, the shortest step first; empty where none fits."""
    return sorted(_fitting(request), key=lambda proposal: proposal.order)


def fewest(request: Request) -> int:
    """The smallest of `counts` GPUs of the trainer for which some layout fits; 0 where none fits."""
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
    """The size of a replica that generates its part of a step soonest; none where no size fits its GPUs."""
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
