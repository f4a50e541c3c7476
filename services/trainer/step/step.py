"""A training step: from references to groups to new weights and metrics. Every rank runs the same code."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.admission.choices import teacher_top
from millrace.contracts.v1.trainer_pb2 import GroupRef, StepRequest, TrainedGroup, TrainedTrajectory
from millrace.errors import InvalidJob, NonFinite, PartialStep
from millrace.spec import JobSpec
from millrace.spec.passes import passes_of
from millrace.telemetry.metrics.histograms import Histogram
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from millrace.wire.arrays import pack_floats
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend
from services.trainer.ranks import collectives
from services.trainer.ranks.event_loop import ControlThread
from services.trainer.step.batch import BatchDivision, RankBatch
from services.trainer.step.fetch import fetch
from services.trainer.step.forward_passes import ForwardResults, run_passes
from services.trainer.step.loss_inputs import make_loss_inputs
from services.trainer.step.metrics import Clock, mismatch_by_part, over_updates, reported, step_histograms
from services.trainer.step.schedule import KlCoefficient, mean_kl, random_seed
from services.trainer.step.update import UpdateResult, update
from services.trainer.step.utilisation import utilisation

UNCHANGED = "nothing was written to the weights."
GIVEN_UP = (
    "earlier updates of this step were written, so the trainer gives these weights up: `millrace resume` continues from"
    " the last checkpoint."
)


@dataclass(frozen=True)
class StepResult:
    """What a step tells the coordinator. Every rank has the same."""

    metrics: dict[str, float]
    histograms: dict[str, Histogram]
    shown: list[TrainedGroup]


@contextmanager
def _report_written_updates(updates: Sequence[UpdateResult]) -> Iterator[None]:
    """Failures of an update say whether earlier `updates` of the step changed the weights."""
    try:
        yield
    except (InvalidJob, NonFinite) as error:
        if updates:
            raise PartialStep(error.what, f"{GIVEN_UP} {error.fix}") from error
        raise type(error)(error.what, f"{UNCHANGED} {error.fix}") from error


def train_step(
    spec: JobSpec,
    backend: Backend,
    request: StepRequest,
    control: ControlThread,
    coefficient: KlCoefficient,
    meter: MemoryMeter,
) -> StepResult:
    """Makes one step and adapts the KL coefficient.

    Raises NonFinite, with the trajectory named, for a NaN or an infinity, InvalidJob where a user's own loss fails:
    the weights are unchanged. PartialStep for the same failures after the first of several updates. OutOfMemory, on the
    ranks that have no memory left: `meter.updated` says whether weights may have changed. InvalidState or Unavailable
    where trajectories are not available.
    """
    clock, parallel, spec = Clock(meter), backend.data_parallel, coefficient.applied_to(spec)
    if request.token_budget:
        spec = spec.model_copy(update={"trainer": spec.trainer.lowered_to(request.token_budget)})
    torch.manual_seed(random_seed(spec, request.step, parallel.rank))
    meter.begin_step(request.step, spec.trainer.token_budget)
    with collectives.fail_together(), clock("fetch"):
        division = BatchDivision.of(
            request.groups, backend, updates=spec.trainer.updates_per_step, token_budget=spec.trainer.token_budget
        )
        wanted = [division.trajectories[index] for index in division.indices(parallel.rank)]
        samples = control.run(fetch(request.work_address, request.job_id, wanted, spec.reward.parts, teacher_top(spec)))
        batch = RankBatch(division, samples, parallel, backend.device)
    meter.tokens = max((sum(m.lengths) for microbatches in batch.updates for m in microbatches), default=0)
    warm = (critic := spec.algorithm.critic) is None or request.step > critic.warmup_steps
    needed = passes_of(spec, updates=len(batch.updates), policy_is_trained=warm)
    scored = run_passes(spec, backend, batch, needed, clock)
    with clock("adv"):
        inputs, metrics = make_loss_inputs(spec, batch, scored)
    updates: list[UpdateResult] = []
    for number in range(len(batch.updates)):
        with _report_written_updates(updates):
            updates.append(update(spec, backend, batch, number, inputs, request.step, clock))
    train_bt, mask_bt = _of_first_weights(batch, scored, updates[0])
    with span(SpanKind.REPORT), meter.during("report"):
        apart = (train_bt, batch.rollout_bt, mask_bt, batch.sampled_with_bt(request.step - 1), inputs.advantages_bt)
        of_trainer, of_engine, counted, same_bt, advantages_bt = (batch.gather(values_bt) for values_bt in apart)
        lengths, timings = [trajectory.tokens for trajectory in division.trajectories], clock.metrics()
        costs = {"actor": backend.cost} | ({} if backend.critic is None else {"critic": backend.critic.cost})
        histograms = step_histograms(of_trainer, of_engine, counted, advantages_bt, batch)
        shown = shown_groups(request.groups, division.sampled_lengths, of_trainer, counted, advantages_bt)
        metrics = {
            **mismatch_by_part(of_trainer, of_engine, counted, same_bt, batch.whole_engine_b),
            **metrics,
            **_adapted(spec, batch, scored.ref_bt, (train_bt, mask_bt), coefficient),
            **over_updates([done.metrics for done in updates]),
            **division.metrics(backend),
            **collectives.maxima({**backend.metrics(), **meter.metrics()}),
            **timings,
            **utilisation(costs, backend.device, lengths, timings, needed.by_part, collectives.world_size()),
        }
        return StepResult(reported(spec, metrics), histograms, shown)


def _of_first_weights(batch: RankBatch, scored: ForwardResults, first: UpdateResult) -> tuple[Tensor, Tensor]:
    """Log-probabilities under the weights that the step began with, as its losses read them, and the sampled tokens
    that have one: those of the policy's own pass, or of the first update where the step made no such pass."""
    if scored.train_bt is not None:
        return scored.train_bt, batch.mask_bt
    assert first.logprobs_bt is not None
    return first.logprobs_bt, first.mask_bt


def _adapted(
    spec: JobSpec,
    batch: RankBatch,
    ref_bt: Tensor | None,
    known: tuple[Tensor, Tensor],
    coefficient: KlCoefficient,
) -> dict[str, float]:
    """Adapts the KL coefficient to the step's mean divergence from the reference; the metrics of both. `known`: the
    answer of `_of_first_weights`."""
    if ref_bt is None:
        return {}
    train_bt, mask_bt = known
    mean = mean_kl(spec, batch, train_bt, ref_bt, mask_bt)
    metrics = {"actor/reference_kl": mean, "actor/kl_coef": coefficient.value}
    coefficient.follow(spec, mean, len(batch.division.trajectories))
    return metrics


MOST_TOKENS = 1 << 18
"""Most sampled tokens that a step tells of: 2 MiB of log-probabilities and advantages."""


def shown_groups(
    groups: Sequence[GroupRef],
    sampled_lengths: Sequence[int],
    logprobs_bt: Tensor,
    known_bt: Tensor,
    advantages_bt: Tensor,
) -> list[TrainedGroup]:
    """The groups that are `shown`, in order, without those that do not fit into `MOST_TOKENS` beside earlier ones.

    The tensors are those of the whole batch, [trajectories, most sampled tokens], and `sampled_lengths` has the sampled
    tokens of each trajectory. A row of `known_bt` is true for all sampled tokens of a trajectory whose
    log-probabilities were computed, and for no token of any other.
    """
    found, room, end = [], MOST_TOKENS, 0
    for group in groups:
        first, end = end, end + (len(group.response_tokens) or len(group.trajectories))
        lengths = sampled_lengths[first:end]
        if not group.shown or sum(lengths) > room:
            continue
        room -= sum(lengths)
        rows = (values_bt[first:end].float().cpu().numpy() for values_bt in (logprobs_bt, known_bt, advantages_bt))
        trajectories = [
            TrainedTrajectory(
                logprobs=pack_floats(logprobs_t[:length]) if known_t[:length].all() else b"",
                advantages=pack_floats(advantages_t[:length]),
            )
            for length, logprobs_t, known_t, advantages_t in zip(lengths, *rows, strict=True)
        ]
        found.append(TrainedGroup(prompt_id=group.prompt_id, trajectories=trajectories))
    return found
