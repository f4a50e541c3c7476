"""Finds what slows some steps down, from their summary, and what to change: only what the job does not have already. A
test checks that each setting is in the spec.

Of each cause it is computed how much of the steps' time would be saved at most if it took none. Generation sets a bound
to that: while replicas generate, a faster trainer or a faster publication would only wait for them.
"""

import json
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millrace.rest.diagnosis import Bottleneck, ChangeView, DiagnosisView, FigureView, FindingView
from millrace.rest.timeline import IdleCause
from millrace.spec.job import JobSpec
from millrace.telemetry.metrics.declaration import Unit
from services.coordinator.diagnosis.forecast import Forecast, forecast
from services.coordinator.diagnosis.summary import ReplicaPace, Summary

LEAST_SHARE = 0.05
"""A cause that costs a smaller part of the steps' time is no finding."""
SLOW = 2.0
"""A replica that takes so many times as long for a token as the others is slow."""
OF_CAUSE = {
    IdleCause.GENERATION: Bottleneck.GENERATION,
    IdleCause.LONG_TAIL: Bottleneck.LONG_TAIL,
    IdleCause.REWARDS: Bottleneck.REWARDS,
    IdleCause.ENVIRONMENT: Bottleneck.ENVIRONMENT,
    IdleCause.QUEUE: Bottleneck.QUEUE,
    IdleCause.TRAINER: Bottleneck.TRAINER,
    IdleCause.PUBLICATION: Bottleneck.PUBLICATION,
    IdleCause.EVALUATION: Bottleneck.EVALUATION,
    IdleCause.CHECKPOINT: Bottleneck.CHECKPOINT,
}
"""What a cause is reported as. Other causes are not reported."""
SENTENCES = {
    Bottleneck.GENERATION: "the engines are too slow for the trainer",
    Bottleneck.LONG_TAIL: "the last answers of a step keep everybody waiting",
    Bottleneck.REWARDS: "complete answers wait for their scores",
    Bottleneck.ENVIRONMENT: "episodes wait for environments and tools",
    Bottleneck.TRAINER: "the trainer is too slow for the engines",
    Bottleneck.PUBLICATION: "new weights take long to reach the replicas",
    Bottleneck.QUEUE: "prompts wait in the queue and no replica takes them",
    Bottleneck.MEMORY: "memory is short",
    Bottleneck.STALENESS_BOUND: "engines wait for the last answers, as max_staleness is 0",
    Bottleneck.EVALUATION: "held-out prompts are scored often or for long",
    Bottleneck.CHECKPOINT: "the job waits for checkpoints",
}


def diagnose(job_id: str, from_step: int, to_step: int, summary: Summary, spec: JobSpec) -> DiagnosisView:
    """The findings of a summary of a job with this spec, the one that costs most first."""
    findings = sorted(_findings(summary, spec), key=lambda finding: -finding.share)
    step_s = summary.seconds / max(1, summary.steps)
    found = Forecast() if summary.measured is None else forecast(summary.measured, spec, step_s)
    return DiagnosisView(
        job_id=job_id,
        from_step=from_step,
        to_step=to_step,
        step_s=step_s,
        simulated_s=found.simulated_s,
        forecasts=list(found.others),
        bottleneck=findings[0].bottleneck if findings else None,
        findings=findings,
        loop_s={cause: seconds / max(1, summary.steps) for cause, seconds in summary.loop_s.items()},
        from_spans=summary.from_spans,
    )


def slow_replica(summary: Summary) -> ReplicaPace | None:
    """The replica that takes at least SLOW times as long for a token as the median of the others, and was the last in
    at least half of the steps; None if there is none."""
    if len(summary.replicas) < 2:
        return None
    slowest = max(summary.replicas, key=lambda pace: pace.token_s)
    others = statistics.median([pace.token_s for pace in summary.replicas if pace is not slowest])
    is_last = 2 * slowest.last_in_steps >= summary.steps
    return slowest if is_last and slowest.token_s >= SLOW * others else None


def _findings(summary: Summary, spec: JobSpec) -> list[FindingView]:
    slow = slow_replica(summary)
    lost: dict[Bottleneck, float] = {}
    for cause, seconds in summary.loop_s.items():
        if cause in OF_CAUSE:
            bottleneck = _reported(OF_CAUSE[cause], summary, slow)
            lost[bottleneck] = lost.get(bottleneck, 0.0) + seconds
    found = []
    for bottleneck, seconds in lost.items():
        share = _saved(bottleneck, seconds, summary) / max(summary.seconds, 1e-9)
        if share >= LEAST_SHARE:
            found.append(_finding(bottleneck, share, seconds, summary, spec, slow))
    return found


def _reported(bottleneck: Bottleneck, summary: Summary, slow: ReplicaPace | None) -> Bottleneck:
    """What lies behind a cause."""
    if bottleneck in (Bottleneck.GENERATION, Bottleneck.LONG_TAIL) and slow is not None:
        return Bottleneck.LONG_TAIL
    if bottleneck is Bottleneck.LONG_TAIL and summary.max_staleness == 0:
        return Bottleneck.STALENESS_BOUND
    if bottleneck is Bottleneck.TRAINER and summary.token_budget:
        return Bottleneck.MEMORY
    if bottleneck is Bottleneck.PUBLICATION and summary.paused_for_lack_of_memory:
        return Bottleneck.MEMORY
    return bottleneck


def _saved(bottleneck: Bottleneck, seconds: float, summary: Summary) -> float:
    """Seconds of the steps that would be saved at most if the cause took none."""
    bounded = bottleneck not in (Bottleneck.GENERATION, Bottleneck.LONG_TAIL, Bottleneck.STALENESS_BOUND)
    return min(seconds, max(0.0, summary.seconds - summary.generating_s)) if bounded else seconds


def _finding(
    bottleneck: Bottleneck, share: float, seconds: float, summary: Summary, spec: JobSpec, slow: ReplicaPace | None
) -> FindingView:
    of_step = seconds / max(1, summary.steps)
    member = slow.member if slow is not None and bottleneck is Bottleneck.LONG_TAIL else ""
    sentence = f"{member} is slower than the other replicas" if member else SENTENCES[bottleneck]
    return FindingView(
        bottleneck=bottleneck,
        share=share,
        seconds=of_step,
        message=f"{sentence}: {of_step:.3g} s of a step of {summary.seconds / max(1, summary.steps):.3g} s.",
        member=member,
        figures=[*_own_figures(bottleneck, summary, slow), *_metrics(bottleneck, summary)],
        changes=changes(bottleneck, spec),
    )


def _seconds(name: str, value: float, meaning: str) -> FigureView:
    return FigureView(name=name, value=value, unit=Unit.SECONDS, meaning=meaning)


def _own_figures(bottleneck: Bottleneck, summary: Summary, slow: ReplicaPace | None) -> Sequence[FigureView]:
    """The figures of spans that speak for a finding."""
    found: list[FigureView] = []
    if summary.replicas:
        busy = summary.generating_s / max(summary.seconds, 1e-9)
        meaning = "Part of the time in which a replica generates, on average."
        found.append(FigureView(name="replicas busy", value=busy, unit=Unit.SHARE, meaning=meaning))
    if bottleneck in (Bottleneck.GENERATION, Bottleneck.LONG_TAIL, Bottleneck.STALENESS_BOUND) and summary.sample_s:
        found.append(_seconds("sample", summary.sample_s, "Mean time of a sample in the engine."))
        found.append(_seconds("longest sample", summary.longest_sample_s, "Longest time of a sample in the engine."))
        found.append(_seconds("engine queue", summary.engine_queue_s, "Mean wait of a sample for a slot in it."))
    if slow is not None and bottleneck is Bottleneck.LONG_TAIL:
        others = statistics.median([pace.token_s for pace in summary.replicas if pace is not slow])
        found.append(_seconds("token of the slow replica", slow.token_s, f"Mean time of a token in {slow.member}."))
        found.append(_seconds("token of the others", others, "Median of the other replicas."))
    if bottleneck is Bottleneck.MEMORY and summary.token_budget:
        value, meaning = float(summary.token_budget), "Token budget since the trainer ran out of memory."
        found.append(FigureView(name="token budget", value=value, unit=Unit.TOKENS, meaning=meaning))
    return found


METRICS: dict[Bottleneck, tuple[str, ...]] = {
    Bottleneck.GENERATION: ("timing_s/gen", "timing_s/generate/mean", "response_length/mean"),
    Bottleneck.LONG_TAIL: ("timing_s/gen", "timing_s/generate/max", "response_length/max", "response_length/mean"),
    Bottleneck.REWARDS: ("timing_s/score/mean", "timing_s/score/max", "timing_s/generate/mean"),
    Bottleneck.ENVIRONMENT: ("timing_s/tools/mean", "timing_s/tools/max", "timing_s/generate/mean"),
    Bottleneck.TRAINER: ("timing_s/train", "timing_s/update_actor", "timing_s/gen", "perf/mfu/actor"),
    Bottleneck.PUBLICATION: (
        "timing_s/update_weights",
        "publication/wire_s",
        "publication/bytes",
        "publication/pause_s",
    ),
    Bottleneck.QUEUE: ("timing_s/gen",),
    Bottleneck.MEMORY: ("timing_s/train", "publication/pause_s", "perf/max_memory_allocated_gb"),
    Bottleneck.STALENESS_BOUND: ("timing_s/gen", "timing_s/train", "response_length/max", "response_length/mean"),
    Bottleneck.EVALUATION: ("timing_s/testing_wait", "timing_s/testing"),
    Bottleneck.CHECKPOINT: ("timing_s/save_checkpoint",),
}
"""The step metrics that speak for a finding."""


def _metrics(bottleneck: Bottleneck, summary: Summary) -> list[FigureView]:
    from millrace.telemetry.metrics.catalogue import find

    found = []
    for name in METRICS[bottleneck]:
        declared = find(name)
        if name in summary.metrics and declared is not None:
            value = summary.metrics[name]
            found.append(FigureView(name=name, value=value, unit=declared.unit, meaning=declared.meaning))
    return found


def _more_than_1(value: Any) -> bool:
    return bool(value > 1)


@dataclass(frozen=True)
class Change:
    """A change that may help."""

    setting: str
    """A field of the spec; empty if it is none of the job's."""
    advice: str
    helps: Callable[[Any], bool] = lambda value: True
    """Whether it changes anything if the setting has this value."""
    none_helps: bool = False
    """Whether it is for a section that the job does not have."""

    def view(self, spec: JobSpec) -> ChangeView | None:
        """The change with the present value; None if the job has no such setting, or has the advised value."""
        if not self.setting:
            return ChangeView(setting="", advice=self.advice)
        value = present(spec, self.setting)
        if (value is None) is not self.none_helps or (value is not None and not self.helps(value)):
            return None
        now = "" if value is None else f" Now: {json.dumps(value)}."
        return ChangeView(setting=self.setting, advice=f"{self.advice}{now}")


def present(spec: JobSpec, setting: str) -> Any:
    """The value of a setting, in JSON's types; None if the job has no such section."""
    value: Any = spec
    for name in setting.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def changes(bottleneck: Bottleneck, spec: JobSpec) -> list[ChangeView]:
    """What may help a job against a bottleneck."""
    return [view for change in CHANGES[bottleneck] if (view := change.view(spec)) is not None]


_SHORTER = "lower it: the longest answers decide."
CHANGES: dict[Bottleneck, tuple[Change, ...]] = {
    Bottleneck.GENERATION: (
        Change("", "start more replicas: they join while the job runs (docs/running.md)."),
        Change("rollout.engine_options", "let each engine run more samples at once: `max_num_seqs` in vLLM."),
        Change("rollout.max_response_tokens", "lower it where long answers earn nothing.", _more_than_1),
        Change("rollout.samples_per_prompt", "generate fewer answers to each prompt.", _more_than_1),
    ),
    Bottleneck.LONG_TAIL: (
        Change("", "remove a slow replica with `millrace drain MEMBER`, or find out what else its host does."),
        Change("schedule.max_staleness", "raise it, so that the others generate for later steps meanwhile."),
        Change("rollout.max_response_tokens", _SHORTER, _more_than_1),
    ),
    Bottleneck.REWARDS: (
        Change("reward.workers", "raise it: so many processes of a replica score at once."),
        Change("reward.timeout_s", "lower it, so that a call that hangs costs less."),
        Change("schedule.max_staleness", "raise it, so that generation goes on while groups are scored."),
    ),
    Bottleneck.ENVIRONMENT: (
        Change("rollout.environment.episode_s", "lower it, so that an episode that hangs costs less."),
        Change("rollout.environment.max_turns", "lower it where later turns earn nothing.", _more_than_1),
        Change("rollout.environment.processes", "raise it where plain calls of the class are slow."),
        Change("rollout.environment.episodes_per_process", "raise it, so that more episodes generate meanwhile."),
        Change("", "see which tools take long: `millrace timeline`."),
    ),
    Bottleneck.TRAINER: (
        Change("", "start the trainer with more ranks."),
        Change("trainer.token_budget", "raise it as far as memory allows: larger micro-batches use a GPU better."),
        Change(
            "trainer.activation_recompute",
            "switch it off where memory allows: it costs about a third more work.",
            bool,
        ),
        Change(
            "schedule.max_staleness",
            "set it to 1 at least, so that engines generate while the trainer trains.",
            operator.not_,
        ),
    ),
    Bottleneck.PUBLICATION: (
        Change(
            "publication.path",
            "set delta where the link is slow: only what changed is sent.",
            lambda path: path != "delta",
        ),
        Change(
            "publication.commit",
            "set shadow where memory allows: generation goes on during the transfer.",
            lambda commit: commit != "shadow",
        ),
        Change("model.lora", "train an adapter: only the adapter is published.", none_helps=True),
        Change("", "see which member is slow: the event `publication.done` has the seconds of each."),
    ),
    Bottleneck.QUEUE: (
        Change("", "see why replicas take no prompts: `millrace fleet`, `millrace logs`."),
        Change("rollout.lease_s", "lower it, so that prompts of a lost replica are issued again sooner."),
    ),
    Bottleneck.MEMORY: (
        Change("rollout.engine_options", "leave more memory free: lower `gpu_memory_utilization`."),
        Change("trainer.activation_recompute", "switch it on, and raise trainer.token_budget again.", operator.not_),
        Change("trainer.backend_options", "offload to host memory or use more ranks: docs/memory.md."),
    ),
    Bottleneck.STALENESS_BOUND: (
        Change(
            "schedule.max_staleness",
            "set it to 1: engines generate the next step while the last answers end.",
            operator.not_,
        ),
        Change("rollout.max_response_tokens", _SHORTER, _more_than_1),
    ),
    Bottleneck.EVALUATION: (
        Change("evaluation.every_steps", "raise it, to evaluate less often.", bool),
        Change("evaluation.prompts", "lower it, to evaluate on fewer prompts.", _more_than_1),
    ),
    Bottleneck.CHECKPOINT: (
        Change(
            "schedule.save_in_background",
            "set it to true: training goes on while a checkpoint is written.",
            operator.not_,
        ),
        Change("schedule.save_every_steps", "raise it, to save less often.", bool),
        Change("", "write checkpoints to a faster disk: `output`."),
    ),
}
