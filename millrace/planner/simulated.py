"""A plan's steps, simulated."""

from dataclasses import replace

from millrace.planner.generation import quantiles, shuffled
from millrace.planner.publishing import PublicationTimes
from millrace.planner.replica import Replica
from millrace.planner.trainer.layout import Cause, total
from millrace.planner.trainer.times import TrainingTimes
from millrace.planner.workload import Workload
from millrace.simulation.job import simulate
from millrace.simulation.outcome import Outcome
from millrace.simulation.setting import Cycled, Setting, TrainerRate, reduced

MOST_ANSWERS = 1024
"""Answers of a step that are simulated."""
LEAST_STEPS, MOST_STEPS = 6, 24
"""Steps that are simulated: more of a small job, whose steps differ more."""
ONCE = (Cause.OPTIMIZER, Cause.DATA, Cause.OFFLOAD)
"""What an update spends once, however many tokens it has."""


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
