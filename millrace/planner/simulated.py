"""A plan's steps, simulated."""

from millrace.planner.generation import quantiles, shuffled
from millrace.planner.publishing import PublicationTimes
from millrace.planner.replica import Replica
from millrace.planner.trainer.layout import Cause, total
from millrace.planner.trainer.times import TrainingTimes
from millrace.planner.workload import Workload
from millrace.simulation.job import simulate
from millrace.simulation.outcome import Outcome
from millrace.simulation.setting import Cycled, Setting, TrainerRate

MOST_ANSWERS = 1024
"""Answers of a step that are simulated. A larger job is simulated with fewer replicas, then with answers each of which
stands for several."""
LEAST_STEPS, MOST_STEPS = 6, 24
"""Steps that are simulated: more of a small job, whose steps differ more."""
ONCE = (Cause.OPTIMIZER, Cause.DATA, Cause.OFFLOAD)
"""What an update spends once, however many tokens it has."""


def simulated(
    replica: Replica, replicas: int, work: Workload, training: TrainingTimes, publication: PublicationTimes
) -> Outcome:
    """Steps of the job, each with the same lengths. Raises InvalidState for a job that cannot go on."""
    times = max(1.0, work.sequences / MOST_ANSWERS)
    followed = max(1, round(replicas / times))
    prompts = max(1, round(work.prompts / times))
    weight = work.prompts / prompts * followed / replicas
    tokens = prompts * work.samples * (work.mean_prompt + work.mean_response) * weight
    once = sum(training.update.get(cause, 0.0) for cause in ONCE)
    lengths = quantiles(work.responses, prompts * work.samples)
    setting = Setting(
        prompts=prompts,
        samples=work.samples,
        lengths=Cycled(shuffled(lengths), work.samples),
        engine=replica,
        trainer=TrainerRate(step_s=once, token_s=(total(training.scoring) + total(training.update) - once) / tokens),
        prompt_tokens=work.mean_prompt,
        max_staleness=work.max_staleness,
        replicas=followed,
        slots=replica.slots,
        cached_tokens=replica.cached_tokens,
        weight=weight,
        publication_s=publication.seconds,
        pause_s=publication.pause,
        recompute_cache=work.recomputes_cache,
    )
    steps = 8 * MOST_ANSWERS // (prompts * work.samples)
    return simulate(setting, min(MOST_STEPS, max(LEAST_STEPS, steps)))
