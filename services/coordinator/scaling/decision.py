"""How many replicas a pool should have, and why. Pure: `decide` maps a state and what was measured to the next state.

Replicas generate for the share `busy` of the time, and the trainer works for `1 − wait` of it. So `ready · busy / (1 −
wait)` replicas would generate a step's groups in the time that the trainer takes for a step: it is then fed, and no
replica is idle. More are started as soon as that demand is clearly above what there is.

Engines generate many samples almost as fast as few, so a replica may be busy all the time with little to do. Whether
fewer would do is therefore judged by `load`, the samples that run in relation to the most that one replica ran; and
carefully: one less at a time, and only while the trainer is fed.

Neither estimate is exact: the longest answer of a step takes as long on any number of replicas. So the effect of a
change is measured. One that failed is taken back, and that number is not passed again for `memory_s`, which doubles.
"""

import math
from dataclasses import dataclass, replace

from millrace.events import ScalingReason

LEAST_WORK = 0.02
"""The trainer's share of work counts as at least this much."""
NEEDED_GAIN = 0.25
"""Replicas that are added have to bring at least this share of the speed that they could bring."""
GROWTH = 2
"""A change at most multiplies the number of replicas by this, and at most divides it by this."""
LONGEST_MEMORY = 8
"""A number that failed is not tried again for at most this multiple of `Pace.memory_s`."""
MORE = 1.25
"""A ceiling is passed again when the demand is above this multiple of what it was; or after LONGEST_MEMORY."""


@dataclass(frozen=True)
class Limits:
    """What the pool may have. `lowest` is at most `highest`."""

    lowest: int
    highest: int
    price: float = 0.0
    """Price of one replica and hour, in the unit of `budget`."""
    budget: float = math.inf
    """The most that all replicas together may cost an hour."""

    @property
    def most(self) -> int:
        """The most replicas that limit and budget allow. The budget comes before `lowest`."""
        if self.price * self.highest <= self.budget:
            return self.highest
        return math.floor(self.budget / self.price + 1e-9)

    def clamp(self, number: int) -> int:
        return min(max(number, self.lowest), self.most)


@dataclass(frozen=True)
class Pace:
    """How fast the number changes."""

    up_s: float = 30.0
    """Seconds from a change until more replicas are started, at the earliest."""
    down_s: float = 300.0
    """Seconds from a change, or from the last work, until fewer are kept, at the earliest."""
    memory_s: float = 1800.0
    """How long a number that failed is not tried again; each further time twice as long, up to LONGEST_MEMORY."""
    up_steps: int = 1
    """Whole steps that are measured before more are started. A step that takes longer than `up_s` is not waited for."""
    down_steps: int = 3
    short: float = 1.1
    """More are started when the demand is above this multiple of what there is."""
    fed: float = 0.1
    """Share of the time for which a trainer may wait and still counts as fed."""
    starved: float = 0.15
    """More are started when the trainer waits for a larger share of the time."""
    load: float = 0.85
    """Fewer are kept only if each of them is then busy for at most this share of the trainer's time."""


@dataclass(frozen=True)
class Seen:
    """What was measured since the last change of the pool. Shares are 0 to 1, times are seconds of one clock."""

    now: float
    works: bool
    """Whether a job needs replicas."""
    ready: int
    """Replicas that serve the job, or are idle because there is none."""
    coming: int
    """Replicas that start, load the model or get the weights."""
    prompts: int
    """Most prompts that were queued or leased at a time: no more replicas than that can have work."""
    wait: float
    """Share of the time in which the trainer waited for groups."""
    busy: float
    """Share of the time in which a replica generated, on average."""
    load: float
    """Samples that a replica ran on average, in relation to the most that one ran at a time."""
    steps: int
    """Whole steps in which the pool did not change."""
    seconds: float
    """How long was measured."""

    @property
    def demand(self) -> float:
        """Replicas that would keep the trainer fed without being idle."""
        return self.ready * self.busy / max(1.0 - self.wait, LEAST_WORK)

    @property
    def least_demand(self) -> float:
        """Replicas that would keep the trainer fed if each had as much to do all the time as one has now at most."""
        return self.ready * self.load / max(1.0 - self.wait, LEAST_WORK)


@dataclass(frozen=True)
class Barred:
    """A number of replicas that is not passed until then."""

    replicas: int
    until: float
    demand: float = 0.0
    """A ceiling's: the demand for which more replicas brought too little."""


@dataclass(frozen=True)
class State:
    """What the decision remembers. It holds for one job: a new one begins with `forget`."""

    wanted: int
    changed_at: float
    worked_at: float
    grown: tuple[int, float, float] | None = None
    """After an increase: the number before it, the trainer's share of work and the demand then. None once it is
    judged."""
    shrunk: bool = False
    """Whether the last change was a decrease."""
    floor: Barred | None = None
    """Fewer did not feed the trainer."""
    ceiling: Barred | None = None
    """More brought too little."""
    failures: int = 0
    """Changes that were taken back."""

    @classmethod
    def of(cls, wanted: int, now: float) -> "State":
        return cls(wanted, now, now)

    def forget(self) -> "State":
        """The state without what was learnt from a job."""
        return replace(self, grown=None, shrunk=False, floor=None, ceiling=None, failures=0)


@dataclass(frozen=True)
class Decision:
    """Another number is wanted."""

    before: int
    wanted: int
    reason: ScalingReason
    message: str


def decide(state: State, seen: Seen, long: Seen, limits: Limits, pace: Pace) -> tuple[State, Decision | None]:
    """The next state, and what changes; None if nothing does. `seen` is what was measured lately, `long` the same
    over at least `pace.down_s`, as far as there is so much."""
    state = _lapsed(state, seen, pace)
    found = (
        _within_limits(state, limits)
        or _without_replicas(state, seen, limits)
        or _without_work(state, seen, limits, pace)
        or _taken_back(state, seen, limits, pace)
        or _up(state, seen, limits, pace)
        or _down(state, seen, long, limits, pace)
    )
    if found is None:
        return _judged(state, seen, pace), None
    wanted, reason, message = found
    return _moved(state, seen, wanted, reason, pace), Decision(state.wanted, wanted, reason, message)


Change = tuple[int, ScalingReason, str]


def _lapsed(state: State, seen: Seen, pace: Pace) -> State:
    floor = state.floor if state.floor is not None and state.floor.until > seen.now else None
    ceiling = state.ceiling
    if ceiling is not None and seen.now >= ceiling.until:
        is_old = seen.now >= ceiling.until + LONGEST_MEMORY * pace.memory_s
        ceiling = None if is_old or seen.demand > MORE * ceiling.demand else ceiling
    return replace(state, floor=floor, ceiling=ceiling, worked_at=seen.now if seen.works else state.worked_at)


def _within_limits(state: State, limits: Limits) -> Change | None:
    wanted = limits.clamp(state.wanted)
    if wanted == state.wanted:
        return None
    if wanted < limits.lowest or (wanted == limits.most < min(state.wanted, limits.highest)):
        cost = f"{limits.price:g} an hour each, and the budget is {limits.budget:g}"
        return wanted, ScalingReason.BUDGET, f"{_replicas(wanted)} at most: they cost {cost}"
    return wanted, ScalingReason.LIMITS, f"the limits are {limits.lowest} to {limits.highest} replicas"


def _without_replicas(state: State, seen: Seen, limits: Limits) -> Change | None:
    if not seen.works or state.wanted > 0 or limits.clamp(1) == 0:
        return None
    return limits.clamp(1), ScalingReason.WORK, "a job waits for a replica"


def _without_work(state: State, seen: Seen, limits: Limits, pace: Pace) -> Change | None:
    wanted, idle_s = limits.clamp(limits.lowest), seen.now - state.worked_at
    if seen.works or state.wanted <= wanted or idle_s < pace.down_s:
        return None
    return wanted, ScalingReason.NO_WORK, f"no job has needed replicas for {idle_s:.0f} s"


def _taken_back(state: State, seen: Seen, limits: Limits, pace: Pace) -> Change | None:
    """The last increase, if it did not make the job faster."""
    if state.grown is None or not _is_settled(state, seen) or seen.steps < 2 * pace.up_steps:
        return None
    before, work, _ = state.grown
    possible = min(seen.ready / before, 1.0 / max(work, LEAST_WORK)) - 1.0
    gained = (1.0 - seen.wait) / max(work, LEAST_WORK) - 1.0
    wanted = limits.clamp(before)
    if gained >= NEEDED_GAIN * possible or wanted >= state.wanted:
        return None
    message = f"{_replicas(state.wanted)} in place of {before} made steps only {max(0.0, gained):.0%} faster"
    return wanted, ScalingReason.NO_GAIN, message


def _up(state: State, seen: Seen, limits: Limits, pace: Pace) -> Change | None:
    measured = seen.steps >= pace.up_steps or seen.seconds >= pace.up_s
    if not (seen.works and _is_settled(state, seen) and measured and seen.now - state.changed_at >= pace.up_s):
        return None
    if state.grown is not None and seen.steps < 2 * pace.up_steps:
        return None  # whether the last increase had an effect is not known yet
    if seen.wait <= pace.starved or seen.demand <= seen.ready * pace.short:
        return None
    most = min(limits.most, GROWTH * max(1, state.wanted), max(1, seen.prompts))
    if state.ceiling is not None:
        most = min(most, state.ceiling.replicas)
    wanted = min(math.ceil(seen.demand - 1e-9), most)
    if wanted <= state.wanted:
        return None
    message = f"the trainer waits {seen.wait:.0%} of the time, replicas are busy {seen.busy:.0%} of it"
    return wanted, ScalingReason.TRAINER_WAITS, f"{message}: {seen.demand:.1f} replicas would keep the trainer fed"


def _down(state: State, seen: Seen, long: Seen, limits: Limits, pace: Pace) -> Change | None:
    measured = long.steps >= pace.down_steps and long.seconds >= pace.down_s
    if not (seen.works and seen.ready and measured and seen.now - state.changed_at >= pace.down_s):
        return None
    fed = max(seen.wait, long.wait) <= pace.fed
    demand = max(seen.demand, long.demand)
    if fed and demand > state.wanted * pace.load:
        demand = max(seen.least_demand, long.least_demand, (state.wanted - 1) * pace.load)
    wanted = max(math.ceil(demand / pace.load - 1e-9), math.ceil(state.wanted / GROWTH), limits.clamp(limits.lowest), 1)
    if state.floor is not None:
        wanted = max(wanted, state.floor.replicas)
    if wanted >= state.wanted:
        return None
    message = f"replicas are busy {long.busy:.0%} of the time with {long.load:.0%} of the most samples that one ran"
    return wanted, ScalingReason.REPLICAS_IDLE, f"{message}; the trainer waits {long.wait:.0%} of the time"


def _is_settled(state: State, seen: Seen) -> bool:
    """Whether all that is wanted serves: otherwise the measurement says nothing of that number."""
    return seen.ready >= state.wanted and seen.coming == 0


def _judged(state: State, seen: Seen, pace: Pace) -> State:
    """The state without the last increase, once that has had its effect."""
    if not _is_settled(state, seen) or seen.steps < 2 * pace.up_steps:
        return state
    return replace(state, grown=None)


def _moved(state: State, seen: Seen, wanted: int, reason: ScalingReason, pace: Pace) -> State:
    moved = replace(state, wanted=wanted, changed_at=seen.now, grown=None)
    until = seen.now + pace.memory_s * min(2**state.failures, LONGEST_MEMORY)
    if reason is ScalingReason.REPLICAS_IDLE:
        return replace(moved, shrunk=True, failures=0 if state.shrunk else state.failures)
    if reason is ScalingReason.NO_GAIN:
        ceiling = Barred(wanted, until, state.grown[2] if state.grown is not None else seen.demand)
        return replace(moved, shrunk=False, ceiling=ceiling, failures=state.failures + 1)
    if reason is ScalingReason.TRAINER_WAITS:
        floor, grown = Barred(state.wanted + 1, until), (max(1, state.wanted), 1.0 - seen.wait, seen.demand)
        return replace(moved, shrunk=False, floor=floor, grown=grown, failures=state.failures + state.shrunk)
    return replace(moved, shrunk=False)


def _replicas(number: int) -> str:
    return f"{number} replica{'s' if number != 1 else ''}"
