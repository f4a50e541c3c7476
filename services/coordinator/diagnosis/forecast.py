"""What other settings would give: the job is simulated with the lengths and rates that were measured of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.errors import InvalidState
from millrace.rest.diagnosis import REPLICAS, ForecastView
from millrace.simulation.job import simulate
from millrace.simulation.setting import (
    Drawn,
    MeasuredRate,
    Request,
    Setting,
    StalenessOf,
    TooStale,
    TrainerRate,
    fitted_rate,
    reduced,
)
from millrace.spec.job import JobSpec
from millrace.spec.passes import needs_whole_batch, why_not_streaming

BOUNDS = (1, 2, 4, 8)
"""Values of `schedule.max_staleness` that are tried."""
MOST_ANSWERS = 512
"""Answers of a step that are simulated."""
STEPS = 12
LEAST_GAIN = 0.03
"""Share of a step that a setting has to save, beyond a smaller one that is reported."""
LARGEST_ERROR = 0.25
"""Nothing is forecast if the job's own setting, simulated, is farther from what was measured."""


@dataclass(frozen=True)
class Measured:
    """Lengths and rates of a job whose answers have one turn."""

    lengths: Sequence[float]
    engine: MeasuredRate
    replicas: int
    slots: int
    prompt_tokens: float
    train_s: float
    """Seconds of a step of the trainer."""
    publication_s: float
    pause_s: float
    score_s: float
    between_s: float
    """Seconds of a step in which the job's loop neither waits for groups nor trains nor publishes."""

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        slots: int,
        metrics: Mapping[str, float],
        *,
        pause_s: float = 0.0,
        between_s: float = 0.0,
    ) -> "Measured | None":
        """`metrics`: means of the step metrics. None if the requests say nothing of the engine."""
        engine = fitted_rate(requests)
        if engine is None:
            return None
        return cls(
            lengths=[request.tokens for request in requests if request.tokens > 0],
            engine=engine,
            replicas=len({request.replica for request in requests}),
            slots=max(1, slots),
            prompt_tokens=metrics.get("prompt_length/mean", 0.0),
            train_s=metrics.get("timing_s/train", 0.0),
            publication_s=metrics.get("timing_s/update_weights", 0.0),
            pause_s=pause_s,
            score_s=metrics.get("timing_s/score/mean", 0.0),
            between_s=between_s,
        )

    def setting(self, spec: JobSpec) -> Setting:
        """The job as it is simulated."""
        answers = spec.schedule.prompts_per_step * spec.rollout.samples_per_prompt
        tokens = answers * (self.prompt_tokens + sum(self.lengths) / len(self.lengths))
        return Setting(
            prompts=spec.schedule.prompts_per_step,
            samples=spec.rollout.samples_per_prompt,
            lengths=Drawn(self.lengths, spec.schedule.prompts_per_step, spec.rollout.samples_per_prompt),
            engine=self.engine,
            trainer=TrainerRate(token_s=self.train_s / tokens),
            prompt_tokens=self.prompt_tokens,
            max_staleness=spec.schedule.max_staleness,
            carried_prompts=spec.schedule.carried_prompts,
            staleness_of=StalenessOf(spec.schedule.staleness_of),
            too_stale=TooStale(spec.schedule.too_stale),
            wait_for_slow=spec.schedule.wait_for_slow,
            replicas=self.replicas,
            slots=self.slots,
            publication_s=self.publication_s,
            pause_s=self.pause_s,
            score_s=self.score_s,
            between_s=self.between_s,
            streaming=not why_not_streaming(spec),
        )


@dataclass(frozen=True)
class Forecast:
    """What the simulation says of a job."""

    simulated_s: float | None = None
    """Seconds of a step as the job is; None if it is not simulated."""
    others: Sequence[ForecastView] = ()
    """Other settings that save time, if the simulation agrees with what was measured."""


def forecast(measured: Measured, spec: JobSpec, step_s: float) -> Forecast:
    """`step_s`: the measured seconds of a step."""
    own = measured.setting(spec)
    simulated_s = _step_s(own)
    if simulated_s is None or step_s <= 0:
        return Forecast()
    if abs(simulated_s / step_s - 1) > LARGEST_ERROR:
        return Forecast(simulated_s)
    return Forecast(simulated_s, list(_others(own, spec, simulated_s)))


def _others(own: Setting, spec: JobSpec, simulated_s: float) -> Iterator[ForecastView]:
    best_s = simulated_s
    for bound in BOUNDS:
        if bound <= own.max_staleness:
            continue
        seconds = _step_s(replace(own, max_staleness=bound))
        if seconds is not None and seconds < best_s - LEAST_GAIN * simulated_s:
            best_s = seconds
            yield ForecastView(setting="schedule.max_staleness", value=bound, step_s=seconds)
    if not own.streaming and not needs_whole_batch(spec):
        seconds = _step_s(replace(own, streaming=True))
        if seconds is not None and seconds < (1 - LEAST_GAIN) * simulated_s:
            yield ForecastView(setting="trainer.streaming", value=True, step_s=seconds)
    seconds = _step_s(replace(own, replicas=own.replicas + 1))
    if seconds is not None and seconds < (1 - LEAST_GAIN) * simulated_s:
        yield ForecastView(setting=REPLICAS, value=own.replicas + 1, step_s=seconds)


def _step_s(setting: Setting) -> float | None:
    """Mean seconds of a step; None for a job that cannot go on."""
    try:
        return simulate(reduced(setting, MOST_ANSWERS), STEPS).step_s
    except InvalidState:
        return None
