"""A training step: from references to groups to new weights and metrics. Every rank runs the same code.

A step takes its groups in parts, one or more. Each part is assessed when it comes, and its gradient added to that of
the first update; when all groups are there, the optimizer makes that update, and further updates follow. So weights
change only in `finish`, and parts can come while other groups of the step are still generated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from millrace.admission.choices import teacher_top
from millrace.contracts.v1.trainer_pb2 import StepRequest
from millrace.errors import InvalidJob, MillraceError, NonFinite, OutOfMemory, PartialStep
from millrace.spec import JobSpec
from millrace.spec.passes import passes_of
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend, models
from services.trainer.ranks import collectives
from services.trainer.ranks.commands import ControlThread
from services.trainer.step.batch import BatchDivision, RankBatch, StepShares, division_metrics
from services.trainer.step.fetch import fetch
from services.trainer.step.forward_passes import run_passes
from services.trainer.step.loss_inputs import make_loss_inputs
from services.trainer.step.metrics import batch_metrics, over_updates, reported
from services.trainer.step.phases import PARTS, Clock, utilisation
from services.trainer.step.result import Part, StepResult, StepTokens
from services.trainer.step.schedule import KlCoefficient, random_seed
from services.trainer.step.update import Update, UpdateResult

UNCHANGED = "nothing was written to the weights."
GIVEN_UP = (
    "earlier updates of this step were written, so the trainer gives these weights up: `millrace resume` continues from"
    " the last checkpoint."
)


@contextmanager
def _report_written_updates(updates: Sequence[UpdateResult]) -> Iterator[None]:
    """Failures of an update say whether earlier `updates` of the step changed the weights."""
    try:
        yield
    except (InvalidJob, NonFinite) as error:
        if updates:
            raise PartialStep(error.what, f"{GIVEN_UP} {error.fix}") from error
        raise type(error)(error.what, f"{UNCHANGED} {error.fix}") from error


class Step:
    """A step in progress. After an error in one of its methods it is over, and the gradients are cleared."""

    def __init__(
        self,
        spec: JobSpec,
        backend: Backend,
        request: StepRequest,
        control: ControlThread,
        coefficient: KlCoefficient,
        meter: MemoryMeter,
    ) -> None:
        """`request` is that of the first part."""
        spec = coefficient.applied_to(spec)
        if request.token_budget:
            spec = spec.model_copy(update={"trainer": spec.trainer.lowered_to(request.token_budget)})
        self.number = request.step
        self.parts: list[Part] = []
        self._spec = spec
        self._backend = backend
        self._control = control
        self._coefficient = coefficient
        self._clock = Clock(meter, lambda: backend.tower_flops)
        self._shares = StepShares.of(request.step_groups or len(request.groups), spec.trainer.updates_per_step)
        trained = (critic := spec.algorithm.critic) is None or request.step > critic.warmup_steps
        self._needed = passes_of(spec, updates=self._shares.updates, policy_is_trained=trained)
        self._first = Update(spec, backend, 0, request.step, self._clock)
        meter.begin_step(request.step, spec.trainer.token_budget)

    @property
    def groups(self) -> int:
        """Groups that were added."""
        return sum(len(part.groups) for part in self.parts)

    def add(self, request: StepRequest) -> None:
        """Assesses the groups of the request, and adds the gradient of those that the first update trains.

        Raises NonFinite, with the trajectory named, for a NaN or an infinity, InvalidJob if a user's own loss fails.
        OutOfMemory, on the ranks that have no memory left. InvalidState or Unavailable if trajectories are not
        available.
        """
        with self._cleared_on_failure():
            torch.manual_seed(random_seed(self._spec, self.number, self._backend.data_parallel.rank, len(self.parts)))
            batch = self._fetched(request)
            scored = run_passes(self._spec, self._backend, batch, self._needed, self._clock)
            with self._clock("adv"):
                inputs, assessment = make_loss_inputs(self._spec, batch, scored)
            self.parts.append(Part(request.groups, batch, scored, inputs, assessment))
            if self._first.number in batch.updates:
                more = self.groups < self._shares.share(self._first.number).stop
                with _report_written_updates([]):
                    self._first.add(batch, inputs, more=more)

    def finish(self) -> StepResult:
        """Makes the updates, when all groups of the step were added, and adapts the KL coefficient.

        Raises as `add`; the weights are unchanged then. PartialStep for the same failures after the first of several
        updates. OutOfMemory: `meter.updated` says whether weights may have changed.
        """
        with self._cleared_on_failure():
            updates: list[UpdateResult] = []
            for number in range(self._shares.updates):
                with _report_written_updates(updates):
                    updates.append(self._made(number))
            with span(SpanKind.REPORT), self._clock.meter.during("report"):
                return self._result(updates)

    def abandon(self) -> None:
        """Clears what was added."""
        self.parts.clear()
        for model in models(self._backend).values():
            model.zero_gradients()

    def _fetched(self, request: StepRequest) -> RankBatch:
        spec, parallel, meter = self._spec, self._backend.data_parallel, self._clock.meter
        with collectives.fail_together(), self._clock("fetch"):
            division = BatchDivision.of(
                request.groups,
                self._backend,
                self._shares,
                token_budget=spec.trainer.token_budget,
                first=self.groups,
            )
            wanted = [division.trajectories[index] for index in division.indices(parallel.rank)]
            address, job = request.work_address, request.job_id
            samples = self._control.run(fetch(address, job, wanted, spec.reward.parts, teacher_top(spec)))
            batch = RankBatch(division, samples, parallel, self._backend.device)
        largest = max((sum(one.lengths) for share in batch.updates.values() for one in share), default=0)
        meter.tokens = max(meter.tokens, largest)
        return batch

    def _made(self, number: int) -> UpdateResult:
        """Makes an update of the step. All but the first read the weights that the one before left."""
        if number == self._first.number:
            return self._first.finish()
        update = Update(self._spec, self._backend, number, self.number, self._clock)
        trained = [part for part in self.parts if number in part.batch.updates]
        for part in trained:
            update.add(part.batch, part.inputs, more=part is not trained[-1])
        return update.finish()

    def _result(self, updates: Sequence[UpdateResult]) -> StepResult:
        backend, divisions = self._backend, [part.batch.division for part in self.parts]
        tokens = StepTokens.of(self.parts, updates[0], self.number - 1)
        lengths, timings = [length for each in divisions for length in each.lengths], self._clock.metrics()
        costs = {"actor": backend.cost} | ({} if backend.critic is None else {"critic": backend.critic.cost})
        ranks = collectives.world_size()
        seen = {part: self._clock.flops.get(part, 0.0) for part in PARTS}
        towers = {} if self._spec.data.images is None else collectives.sums(seen)
        metrics = {
            **tokens.mismatch(),
            **batch_metrics([part.assessment for part in self.parts]),
            **self._adapted(tokens),
            **over_updates([done.metrics for done in updates]),
            **division_metrics(divisions, backend),
            **collectives.maxima({**backend.metrics(), **self._clock.meter.metrics()}),
            **timings,
            **utilisation(costs, backend.device, lengths, timings, self._needed.by_part, ranks, towers),
        }
        return StepResult(reported(self._spec, metrics), tokens.histograms(), tokens.shown(self.parts))

    def _adapted(self, tokens: StepTokens) -> dict[str, float]:
        """Adapts the KL coefficient to the step's mean divergence from the reference; the metrics of both."""
        kl, coefficient = self._spec.algorithm.kl, self._coefficient
        mean = None if kl is None else tokens.reference_kl(kl.name)
        if mean is None:
            return {}
        metrics = {"actor/reference_kl": mean, "actor/kl_coef": coefficient.value}
        coefficient.follow(self._spec, mean, len(tokens.mask_bt))
        return metrics

    @contextmanager
    def _cleared_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OutOfMemory:
            raise  # the caller frees what the interrupted pass left, outside of its frames
        except MillraceError:
            self.abandon()
            raise
