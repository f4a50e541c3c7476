"""A plan: memory, seconds of each part of a step, what waits for what, and what it costs."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from millrace.errors import refused
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import KEPT, Ledger, Prediction, peak
from millrace.memory.prediction import predict
from millrace.memory.text import fits
from millrace.planner import constants, generation
from millrace.planner.generation import Generation, quantiles, shuffled
from millrace.planner.hardware import Gpu, Links
from millrace.planner.publishing import PublicationTimes, publication_times, turn_seconds
from millrace.planner.replica import Replica, replica_of
from millrace.planner.trainer.layout import PLANNED, Cause, Imbalance, Layout, layout_of, total
from millrace.planner.trainer.times import Trainer, TrainingTimes, training_times
from millrace.planner.workload import Workload
from millrace.simulation.job import simulate
from millrace.simulation.outcome import Outcome
from millrace.simulation.setting import Cycled, Setting, TrainerRate, reduced
from millrace.spec import JobSpec
from millrace.spec.passes import why_not_streaming

HOUR_S = 3600.0
MILLION = 1e6
MOST_ANSWERS = 1024
"""Answers of a step that are simulated."""
LEAST_STEPS, MOST_STEPS = 6, 24
"""Steps that are simulated: more of a small job, whose steps differ more."""
ONCE = (Cause.OPTIMIZER, Cause.DATA, Cause.OFFLOAD)
"""What an update spends once, however many tokens it has."""


class Limit(StrEnum):
    """What a plan does not fit into."""

    TRAINER_MEMORY = "trainer_memory"
    REPLICA_MEMORY = "replica_memory"
    HOST_MEMORY = "host_memory"


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a plan."""

    gpu: Gpu
    trainer_gpus: int
    rollout_gpus: int
    colocated: bool = False
    """Whether trainer and replicas take turns on the same GPUs. Millrace does not run so; it is for comparison."""

    @property
    def gpus(self) -> int:
        return self.trainer_gpus if self.colocated else self.trainer_gpus + self.rollout_gpus

    def replicas(self, replica: Replica) -> int:
        """How many replicas there are. Raises InvalidJob if the GPUs give not even one, or if replicas that take
        turns with the trainer would leave some GPUs out."""
        gpus = self.trainer_gpus if self.colocated else self.rollout_gpus
        field = "--trainer-gpus" if self.colocated else "--rollout-gpus"
        if self.colocated and gpus % replica.workers:
            reason = f"replicas of {replica.workers} GPUs would leave some of them out"
            raise refused(field, gpus, reason, f"give a multiple of {replica.workers}, or smaller replicas.")
        if gpus < replica.workers:
            fix = f"give at least {replica.workers}, or lower the sizes in rollout.engine_options."
            raise refused(field, gpus, f"one replica of this job has {replica.workers} GPUs", fix)
        return gpus // replica.workers

    def overlaps(self, work: Workload) -> bool:
        """Whether generation and training go on at the same time."""
        return work.max_staleness > 0 and not self.colocated

    def generation(self, replica: Replica, work: Workload) -> Generation:
        """One replica's part of a step. Raises InvalidJob as `replicas`."""
        generate = generation.steady if self.overlaps(work) else generation.alone
        return generate(replica, work, self.replicas(replica))


@dataclass(frozen=True)
class Plan:
    """What is predicted of a job on a cluster. Sizes are bytes."""

    spec: JobSpec
    shape: ModelShape
    cluster: Cluster
    work: Workload
    layout: Layout
    trainer_memory: Prediction
    host_bytes: float
    """Host memory of the fullest host of the trainer."""
    replica: Replica
    replicas: int
    generation: Generation
    training: TrainingTimes
    publication: PublicationTimes | None
    """None if trainer and replicas take turns."""
    turns_s: float
    """Seconds for changing weights between trainer and engine on the same GPUs; 0 otherwise."""

    @property
    def overlapped(self) -> bool:
        return self.cluster.overlaps(self.work)

    @property
    def generating_s(self) -> float:
        """Seconds of a step in which replicas generate or put weights in place."""
        return self.generation.total + (self.publication.pause if self.publication and self.overlapped else 0.0)

    @property
    def training_s(self) -> float:
        """Seconds of a step in which the trainer computes or publishes."""
        return self.training.total + (self.publication.seconds if self.publication else self.turns_s)

    @property
    def least_s(self) -> float:
        """Seconds of a step in which the longer side never waits; one side after the other if they take turns."""
        if self.overlapped:
            return max(self.generating_s, self.training_s)
        return self.generating_s + self.training_s

    @cached_property
    def simulated(self) -> Outcome | None:
        """The job's steps, simulated; None if trainer and replicas take turns."""
        if self.publication is None:
            return None
        streaming = not why_not_streaming(self.spec)
        return simulated(self.replica, self.replicas, self.work, self.training, self.publication, streaming=streaming)

    @property
    def step_s(self) -> float:
        return self.least_s if self.simulated is None else self.simulated.step_s

    @property
    def trainer_idle(self) -> float:
        """Share of a step in which the trainer waits."""
        return 0.0 if self.simulated is None else self.simulated.trainer_idle

    @property
    def rollout_idle(self) -> float:
        """Share of a step in which a replica waits, on average."""
        return 0.0 if self.simulated is None else self.simulated.replica_idle

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, those of prompts included."""
        return self.work.tokens / self.step_s

    @property
    def cost_per_million(self) -> float:
        """Price of a million trained tokens."""
        return self.cluster.gpu.price_per_hour * self.cluster.gpus * self.step_s / HOUR_S / self.work.tokens * MILLION

    @property
    def balanced_ratio(self) -> float:
        """Rollout GPUs for each trainer GPU at which the step is shortest for a given sum of both, where each side's
        seconds fall with its GPUs: equal seconds if they overlap, else the root of their ratio."""
        work = self.generating_s * self.cluster.rollout_gpus / (self.training_s * self.cluster.trainer_gpus)
        return float(work if self.overlapped else work**0.5)

    @property
    def limits(self) -> list[Limit]:
        """What is exceeded; empty if the plan fits."""
        gpu, found = self.cluster.gpu, []
        if not fits(peak(self.trainer_memory).total, gpu.memory):
            found.append(Limit.TRAINER_MEMORY)
        if not self.replica.fits:
            found.append(Limit.REPLICA_MEMORY)
        if self.host_bytes > gpu.host_room:
            found.append(Limit.HOST_MEMORY)
        return found


def make_plan(
    spec: JobSpec,
    shape: ModelShape,
    cluster: Cluster,
    work: Workload,
    engine: str = "vllm",
    imbalance: Imbalance = PLANNED,
) -> Plan:
    """The plan of a job. Raises InvalidJob and InvalidState for options that do not fit the model or the numbers of
    GPUs."""
    gpu = cluster.gpu
    memory = predict(spec, shape, cluster.trainer_gpus)
    layout, replica = layout_of(spec, shape, cluster.trainer_gpus), replica_of(spec, shape, engine, gpu)
    replicas = cluster.replicas(replica)
    budget, tower = spec.trainer.token_budget, spec.trainer.train_tower
    trainer = Trainer(gpu, shape, layout, work, budget, spec.model.lora, imbalance, tower)
    return Plan(
        spec=spec,
        shape=shape,
        cluster=cluster,
        work=work,
        layout=layout,
        trainer_memory=memory,
        host_bytes=_host_bytes(memory, cluster),
        replica=replica,
        replicas=replicas,
        generation=cluster.generation(replica, work),
        training=training_times(trainer),
        publication=None
        if cluster.colocated
        else publication_times(
            spec, shape, replica, trainer_gpus=cluster.trainer_gpus, rollout_gpus=cluster.rollout_gpus
        ),
        turns_s=_turns(spec, shape, memory, gpu) if cluster.colocated else 0.0,
    )


def _host_bytes(memory: Prediction, cluster: Cluster) -> float:
    """Host memory of a full host: what its ranks have there, with turns also what leaves the GPUs for the replicas."""
    ranks = min(cluster.trainer_gpus, cluster.gpu.gpus_per_host)
    most = max(_of_rank(ledger, cluster.colocated) for ledger in memory.values())
    return ranks * (most + constants.PROCESS_BYTES)


def _of_rank(ledger: Ledger, colocated: bool) -> float:
    moved = sum(ledger.device.get(part, 0.0) for part in KEPT) if colocated else 0.0
    return sum(ledger.host.values()) + moved


def _turns(spec: JobSpec, shape: ModelShape, memory: Prediction, gpu: Gpu) -> float:
    """Seconds for changing over: what the trainer keeps goes to host memory and comes back, and weights to the
    engine."""
    kept = max(sum(ledger.device.get(part, 0.0) for part in KEPT) for ledger in memory.values())
    return 2 * kept / Links(gpu).to_host + turn_seconds(spec, shape)


def simulated(
    replica: Replica,
    replicas: int,
    work: Workload,
    training: TrainingTimes,
    publication: PublicationTimes,
    *,
    streaming: bool,
) -> Outcome:
    """Steps of the job, each with the same lengths. Raises InvalidState for a job that cannot go on."""
    once = sum(training.update.get(cause, 0.0) for cause in ONCE)
    each = total(training.scoring) + total(training.update) - once
    whole = Setting(
        prompts=work.prompts,
        samples=work.samples,
        lengths=Cycled((), work.samples),
        engine=replica,
        trainer=TrainerRate(step_s=once, token_s=each / work.tokens),
        prompt_tokens=work.mean_prompt,
        prompt_s=replica.seeing(work.image_tokens),
        max_staleness=work.max_staleness,
        replicas=replicas,
        slots=replica.slots,
        cached_tokens=replica.cached_tokens,
        state_tokens=replica.state_tokens,
        publication_s=publication.seconds,
        pause_s=publication.pause,
        recompute_cache=work.recomputes_cache,
        streaming=streaming,
    )
    part = reduced(whole, MOST_ANSWERS)
    answers = part.prompts * part.samples
    lengths = Cycled(shuffled(quantiles(work.responses, answers)), work.samples)
    steps = min(MOST_STEPS, max(LEAST_STEPS, 8 * MOST_ANSWERS // answers))
    return simulate(replace(part, lengths=lengths), steps)
