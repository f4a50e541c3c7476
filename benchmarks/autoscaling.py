"""`python -m benchmarks.autoscaling`: a simulated day of a job whose replicas the coordinator's decision scales.

Answers are long in the afternoon and short at night, a replica's price follows the same hours, spot replicas get a
notice of two minutes, others die without one, and a replica takes minutes to come. Fixed numbers are compared with it.
"""

import json
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from millrace.ids import JobId
from millrace.simulation.engine import Engine
from millrace.simulation.job import Phase, Simulation
from millrace.simulation.setting import Fault, FaultKind, MeasuredRate, Setting, TrainerRate
from services.coordinator.scaling.decision import Decision, Limits, Pace, State, decide
from services.coordinator.scaling.figures import Figures, Look

DAY_S, HOUR_S = 86_400.0, 3600.0
LOOK_S = 5.0
NOTICE_S = 120.0
JOB = JobId("simulated")
RESULTS = Path(__file__).parent / "results" / "autoscaling.json"


@dataclass(frozen=True)
class Day:
    """What the day is like."""

    lowest: int = 1
    highest: int = 8
    budget: float = 24.0
    """Most that all replicas together may cost an hour."""
    price: tuple[float, float] = (2.0, 6.0)
    """Price of a replica and hour: at night, in the afternoon."""
    tokens: tuple[float, float] = (300.0, 2400.0)
    """Median length of an answer: at night, in the afternoon. One in fifty is eight times as long."""
    start_s: float = 180.0
    """Seconds from the order until a replica serves."""
    notices: float = 0.25
    """Spot notices of a replica and hour."""
    deaths: float = 0.05
    """Deaths of a replica and hour, without notice."""
    seed: int = 0

    def height(self, time_s: float) -> float:
        """0 at 3 o'clock, 1 at 15 o'clock."""
        return 0.5 - 0.5 * math.cos(2 * math.pi * (time_s - 3 * HOUR_S) / DAY_S)

    def price_at(self, time_s: float) -> float:
        return self.price[0] + (self.price[1] - self.price[0]) * self.height(time_s)


class Watched(Simulation):
    """A simulated job whose replicas come and go from outside."""

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls `call` now and at these intervals."""

        def again() -> None:
            call()
            self._at(self.now + seconds, again)

        self._at(self.now, again)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._at(self.now + seconds, call)

    @property
    def serving(self) -> list[Engine]:
        """The replicas that take prompts."""
        return [each for each in self._engines if each not in self._draining]

    def number(self, engine: Engine) -> int:
        """Number of the replica, as `Fault` has it."""
        return self._joined.index(engine)

    @property
    def draining(self) -> int:
        return len(self._draining)

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for groups."""
        return self._phase is Phase.WAIT

    @property
    def prompts(self) -> int:
        return len(self._queue) + len(self._leased)


@dataclass
class Lengths:
    """Lengths of answers that follow the hours of the day."""

    day: Day
    now: Callable[[], float] = lambda: 0.0

    def of(self, prompt: int, sample: int, attempt: int) -> float:
        rng = random.Random(f"{self.day.seed} {prompt} {sample} {attempt}")
        low, high = self.day.tokens
        median = low + (high - low) * self.day.height(self.now())
        return max(1.0, median * math.exp(rng.gauss(0, 0.4)) * (8.0 if rng.random() < 0.02 else 1.0))


@dataclass
class Result:
    """What came of a day."""

    steps: int = 0
    trainer_waits: float = 0.0
    replicas_idle: float = 0.0
    replica_hours: float = 0.0
    cost: float = 0.0
    dearest_hour: float = 0.0
    """The highest price of all wanted replicas together at any moment, for an hour."""
    smallest: int = 0
    largest: int = 0
    reversals: int = 0
    """How often the wanted number went up after it went down, or the other way round."""
    notices: int = 0
    deaths: int = 0
    prompts_lost: int = 0
    staleness: int = 0
    decisions: dict[str, int] = field(default_factory=dict)
    by_hour: list[float] = field(default_factory=list)
    """Mean number of serving replicas."""


class Hall:
    """The replicas of the day, scaled by the decision; or a fixed number of them."""

    def __init__(self, day: Day, fixed: int = 0, slower: float = 1.0) -> None:
        """`slower`: seconds of a token and of training, as a multiple; fewer steps are sooner simulated."""
        self.day, self.fixed = day, fixed
        lengths = Lengths(day)
        first = fixed or day.lowest
        self.simulation = Watched(
            Setting(
                prompts=16,
                samples=4,
                lengths=lengths,
                engine=MeasuredRate((1, 16, 64), tuple(slower * seconds for seconds in (0.012, 0.016, 0.03))),
                trainer=TrainerRate(step_s=6.0 * slower, token_s=0.00025 * slower),
                prompt_tokens=200,
                max_staleness=2,
                replicas=first,
                slots=16,
                publication_s=2.0,
                pause_s=0.5,
            )
        )
        lengths.now = lambda: self.simulation.now
        self.pace = Pace(up_s=60.0, down_s=300.0)
        self.figures = Figures(self.pace.down_s)
        self.state = State.of(first, 0.0)
        self.decisions: list[tuple[float, Decision]] = []
        self.coming = 0
        self.seen: deque[tuple[float, int, int, float]] = deque()
        """Time, serving and draining replicas, the wanted ones' price of an hour."""
        self.waits = self.busy = 0.0
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(day.seed)

    def look(self) -> None:
        """One look of the autoscaler, and what changes the fleet meanwhile."""
        simulation, day = self.simulation, self.day
        serving, price = simulation.serving, day.price_at(simulation.now)
        running = [engine.running for engine in serving]
        busy = sum(each > 0 for each in running)
        self.figures.add(
            Look(
                simulation.now,
                JOB,
                len(simulation.steps),
                simulation.waits,
                len(serving),
                busy,
                sum(running),
                max(running, default=0),
                self.coming,
                simulation.prompts,
            )
        )
        if not self.fixed:
            limits = Limits(day.lowest, day.highest, price, day.budget)
            seen, long = (self.figures.seen(seconds) for seconds in (self.pace.up_s, self.pace.down_s))
            self.state, decision = decide(self.state, seen, long, limits, self.pace)
            if decision is not None:
                self.decisions.append((simulation.now, decision))
        self.waits += simulation.waits
        self.busy += busy / max(1, len(serving))
        self.seen.append((simulation.now, len(serving), simulation.draining, self.state.wanted * price))
        self._faults(serving)
        self._follow()

    def _follow(self) -> None:
        """Starts or drains replicas until there are as many as wanted, as a scaler does."""
        missing = self.state.wanted - len(self.simulation.serving) - self.coming
        for _ in range(max(0, missing)):
            self.coming += 1
            self.simulation.after(self.day.start_s, self._arrive)
        for engine in self.simulation.serving[::-1][: max(0, -missing)]:
            self._drain(engine)

    def _arrive(self) -> None:
        self.coming -= 1
        self.simulation.strike(Fault(self.simulation.now, FaultKind.JOIN))

    def _drain(self, engine: Engine) -> None:
        number = self.simulation.number(engine)
        self.simulation.strike(Fault(self.simulation.now, FaultKind.DRAIN, number))

    def _faults(self, serving: list[Engine]) -> None:
        for engine in serving:
            chance, number = self._rng.random() * HOUR_S / LOOK_S, self.simulation.number(engine)
            if chance < self.day.notices:
                self.counts["notices"] += 1
                self._drain(engine)
                self.simulation.after(
                    NOTICE_S, partial(self.simulation.strike, Fault(0.0, FaultKind.DIE, number, seconds=1.0))
                )
            elif chance < self.day.notices + self.day.deaths:
                self.counts["deaths"] += 1
                self.simulation.strike(Fault(self.simulation.now, FaultKind.DIE, number, seconds=15.0))

    def run(self, seconds: float) -> Result:
        """The day, or the first part of it."""
        self.simulation.every(LOOK_S, self.look)
        steps = self.simulation.run(seconds=seconds)
        ledger, looks = self.simulation.ledger(), len(self.seen)
        wanted = [decision.wanted for _, decision in self.decisions]
        ways = np.sign(np.diff([self.fixed or self.day.lowest, *wanted]))
        hours = [(int(at // HOUR_S), serving) for at, serving, _, _ in self.seen]
        return Result(
            steps=len(steps),
            trainer_waits=self.waits / looks,
            replicas_idle=1 - self.busy / looks,
            replica_hours=sum(serving + draining for _, serving, draining, _ in self.seen) * LOOK_S / HOUR_S,
            cost=sum((s + d) * self.day.price_at(at) for at, s, d, _ in self.seen) * LOOK_S / HOUR_S,
            dearest_hour=max(price for *_, price in self.seen),
            smallest=min([self.fixed or self.day.lowest, *wanted]),
            largest=max([self.fixed or self.day.lowest, *wanted]),
            reversals=int((np.diff(ways) != 0).sum()),
            notices=self.counts["notices"],
            deaths=self.counts["deaths"],
            prompts_lost=ledger.issued - ledger.trained - ledger.in_flight,
            staleness=max(behind for step in steps for behind in step.oldest),
            decisions=dict(Counter(str(decision.reason) for _, decision in self.decisions)),
            by_hour=[
                round(float(np.mean([n for hour, n in hours if hour == one])), 1) for one in range(hours[-1][0] + 1)
            ],
        )


def main() -> None:
    """Writes the days, scaled and with fixed numbers, into benchmarks/results."""
    days = {"scaled": Hall(Day()).run(DAY_S)}
    days |= {f"fixed {number}": Hall(Day(), number).run(DAY_S) for number in (1, 2, 4, 8)}
    RESULTS.write_text(json.dumps({name: vars(result) for name, result in days.items()}, indent=1) + "\n")
    for name, result in days.items():
        print(name, vars(result))


if __name__ == "__main__":
    main()
