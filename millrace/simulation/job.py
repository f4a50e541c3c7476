"""The simulated job: it issues prompts, replicas generate, the trainer trains and publishes, as the coordinator has it.

A step's prompts are issued after the publication before it, as many as keep the staleness bound. Replicas take whole
groups, the emptiest one first. The trainer takes a step's worth of complete groups, in the order in which their prompts
were issued; with streaming it begins with those that are certain to be among them.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain

from millrace.errors import InvalidState
from millrace.simulation.engine import Answer, Engine, Group
from millrace.simulation.outcome import Ledger, Outcome, Step
from millrace.simulation.setting import Fault, FaultKind, Setting, TooStale

STALE_ROUNDS = 8
"""The simulation ends with an error when this many times a step's prompts came too late for one step, as a job does."""
WARM_STEPS = 3
"""Steps that are left out, beside as many as the staleness bound has: the engines fill first."""


class Phase(Enum):
    """What the trainer is at."""

    WAIT = auto()
    TRAIN = auto()
    PUBLISH = auto()
    AWAY = auto()


@dataclass
class Counts:
    """What happened since the last publication."""

    begin_s: float = 0.0
    trainer_s: float = 0.0
    late: int = 0
    lost_tokens: float = 0.0


def simulate(setting: Setting, steps: int = 8, warm: int | None = None) -> Outcome:
    """The outcome of `steps` steps, after `warm` others. Raises InvalidState for a job that cannot go on."""
    left_out = WARM_STEPS + setting.max_staleness if warm is None else warm
    return Outcome(Simulation(setting).run(left_out + steps)[left_out:])


class Simulation:
    """See the module's docstring."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.version = 0
        self.steps: list[Step] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._engines = [Engine(setting, 0.0, 0) for _ in range(setting.replicas)]
        self._joined = list(self._engines)
        """All replicas that ever joined."""
        self._draining: set[Engine] = set()
        self._busy_before: dict[Engine, float] = {}
        self._issued = self._trained = self._in_flight = self._dropped = self._orders = 0
        self._again: deque[Group] = deque()
        """Prompts to be issued again."""
        self._queue: deque[Group] = deque()
        self._leased: dict[Group, None] = {}
        self._ready: list[Group] = []
        self._timely: tuple[int, set[Group]] = (0, set())
        """A version, and complete groups that are not too stale for it."""
        self._part: list[Group] = []
        """What the trainer computes on."""
        self._taken: list[Group] = []
        """Groups of the step, those of `_part` included."""
        self._phase = Phase.WAIT
        self._turn = 0
        """Counts the trainer's phases: events of another turn are void."""
        self._counts = Counts()

    def run(self, steps: float = math.inf, *, seconds: float = math.inf) -> list[Step]:
        """Simulates until this number of steps is published or this time is over. Raises InvalidState."""
        for fault in self.setting.faults:
            self._at(fault.time_s, partial(self.strike, fault))
        self._issue()
        self._look()
        while len(self.steps) < steps and self.now < seconds:
            if not self._events:
                what = f"the simulated job stops in step {len(self.steps) + 1}: nobody has anything left to do."
                raise InvalidState(what, "let a replica join, or give the trainer and the replicas other faults.")
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.steps

    def ledger(self) -> Ledger:
        """The number of prompts in each state."""
        held = len(self._queue) + len(self._leased) + len(self._ready) + len(self._taken) + len(self._again)
        return Ledger(self._issued, self._trained, held, self._dropped)

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        if time_s < math.inf:
            self._scheduled += 1
            heapq.heappush(self._events, (time_s, self._scheduled, event))

    # The coordinator.

    def _issue(self) -> None:
        setting = self.setting
        capacity = (setting.max_staleness + self.version + 1) * setting.prompts + setting.carried_prompts
        while self._trained + self._in_flight < capacity:
            if self._again:
                group = self._again.popleft()
            else:
                group = self._group(self._issued, 0)
                self._issued += 1
            self._in_flight += 1
            self._orders += 1
            group.order = self._orders
            self._queue.append(group)

    def _group(self, prompt: int, attempt: int) -> Group:
        group = Group(prompt, attempt, left=self.setting.samples)
        of = self.setting.lengths.of
        group.answers = [Answer(group, max(1.0, of(prompt, sample, attempt))) for sample in range(self.setting.samples)]
        return group

    def _look(self) -> None:
        """Goes on wherever something can go on."""
        self._reject()
        self._lease()
        if self._phase is Phase.WAIT:
            self._take()

    def _reject(self) -> None:
        """Issues again or drops what came too late."""
        if self.setting.too_stale is TooStale.TRAIN:
            return
        if self._timely[0] != self.version:
            self._timely = self.version, set()
        timely = self._timely[1]
        unknown = [group for group in self._ready if group not in timely]
        late = [group for group in unknown if self._staleness(group) > self.setting.max_staleness]
        gone = set(late)
        timely.update(group for group in unknown if group not in gone)
        if not late:
            return
        self._ready = [group for group in self._ready if group not in gone]
        for group in late:
            self._counts.late += 1
            self._counts.lost_tokens += self._tokens_of(group)
            self._in_flight -= 1
            if self.setting.too_stale is TooStale.DROP:
                self._dropped += 1
            else:
                self._again.append(self._group(group.prompt, group.attempt + 1))
        if self._counts.late > STALE_ROUNDS * self.setting.prompts:
            what = f"{self._counts.late} groups came too late for step {len(self.steps) + 1} of the simulation."
            raise InvalidState(what, "raise schedule.max_staleness, or lower schedule.prompts_per_step.")
        self._issue()

    def _staleness(self, group: Group) -> float:
        """The staleness of its stalest answer."""
        return max(answer.staleness(self.version, self.setting.staleness_of) for answer in group.answers)

    def _lease(self) -> None:
        if self._phase is Phase.AWAY and not self.setting.lease_while_away:
            return
        taking = [(place, engine) for place, engine in enumerate(self._engines) if engine not in self._draining]
        free = [(engine.load, place) for place, engine in taking]
        heapq.heapify(free)
        touched: dict[Engine, None] = {}
        while self._queue and free and free[0][0] * self.setting.weight < self.setting.slots:
            load, place = free[0]
            group = self._queue.popleft()
            self._leased[group] = None
            self._engines[place].take(group)
            touched[self._engines[place]] = None
            heapq.heapreplace(free, (load + len(group.answers), place))
        for engine in touched:
            self._move(engine)

    # Replicas.

    def _move(self, engine: Engine) -> None:
        """Brings a replica to the present time, and schedules its next end."""
        engine.advance(self.now)
        for answer in engine.ended():
            if not answer.group.left:
                self._at(self.now + self.setting.score_s, partial(self._complete, answer.group))
        engine.start()
        if engine in self._draining and not engine.load:
            self._engines.remove(engine)
            self._draining.discard(engine)
        end_s = engine.next_end()
        self._at(end_s, partial(self._on_end, engine, engine.stamp))

    def _on_end(self, engine: Engine, stamp: int) -> None:
        if engine.stamp == stamp:
            self._move(engine)
            self._look()

    def _complete(self, group: Group) -> None:
        if self._leased.pop(group, 0) is None:
            self._ready.append(group)
            self._look()

    # The trainer.

    def _take(self) -> None:
        """Takes what the trainer can begin with."""
        wanted = self.setting.prompts - len(self._taken)
        first = self._first(wanted) if self.setting.streaming or self.setting.wait_for_slow else []
        due = first if self.setting.wait_for_slow else self._ready
        if len(due) < wanted:
            due = first if self.setting.streaming else []
        part = sorted(due, key=_order)[:wanted]
        if not part:
            return
        chosen = set(part)
        self._ready = [group for group in self._ready if group not in chosen]
        self._taken += part
        self._part = part
        self._train()

    def _first(self, wanted: int) -> list[Group]:
        """The complete groups among so many prompts in flight, the ones that were issued first."""
        in_flight = chain(self._queue, self._leased, self._ready)
        last = max(heapq.nsmallest(wanted, map(_order, in_flight)), default=0)
        return [group for group in self._ready if group.order <= last]

    def _train(self) -> None:
        rate = self.setting.trainer
        seconds = rate.part_s + rate.token_s * sum(self._trained_tokens(group) for group in self._part)
        if len(self._taken) == self.setting.prompts:
            seconds += rate.step_s
        self._enter(Phase.TRAIN)
        self._at(self.now + seconds, partial(self._on_trained, self._turn, seconds))

    def _on_trained(self, turn: int, seconds: float) -> None:
        if turn != self._turn:
            return
        self._counts.trainer_s += seconds
        self._part = []
        if len(self._taken) < self.setting.prompts:
            self._enter(Phase.WAIT)
            self._look()
        else:
            self._publish()

    def _publish(self) -> None:
        setting = self.setting
        self._enter(Phase.PUBLISH)
        self._at(self.now + max(0.0, setting.publication_s - setting.pause_s), partial(self._commit, self._turn))

    def _commit(self, turn: int) -> None:
        if turn != self._turn:
            return
        for engine in list(self._engines):  # one that drains may leave
            engine.advance(self.now)
            engine.commit(self.version + 1)
            self._move(engine)
        pause_s = min(self.setting.pause_s, self.setting.publication_s)
        self._at(self.now + pause_s, partial(self._on_published, self._turn))

    def _on_published(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._counts.trainer_s += self.setting.publication_s
        taken, self._taken = self._taken, []
        self._trained += len(taken)
        self._in_flight -= len(taken)
        self._record(taken)
        self.version += 1
        self._issue()
        self._at(self.now + self.setting.between_s, partial(self._on_free, self._turn))
        self._look()

    def _on_free(self, turn: int) -> None:
        if turn == self._turn:
            self._enter(Phase.WAIT)
            self._look()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._turn += 1

    # Faults.

    def strike(self, fault: Fault) -> None:
        """Lets a fault happen now."""
        if fault.kind is FaultKind.JOIN:
            engine = Engine(self.setting, self.now, self.version)
            self._engines.append(engine)
            self._joined.append(engine)
        elif fault.kind is FaultKind.DIE:
            self._lose(self._joined[fault.replica], fault.seconds)
        elif fault.kind is FaultKind.DRAIN:
            engine = self._joined[fault.replica]
            if engine in self._engines:
                self._draining.add(engine)
                self._move(engine)
        else:
            self._leave(fault.seconds)
        self._look()

    def _lose(self, engine: Engine, seconds: float) -> None:
        if engine not in self._engines:
            return
        engine.advance(self.now)
        self._engines.remove(engine)
        self._draining.discard(engine)
        engine.stamp += 1
        groups = engine.stop()
        self._at(self.now + seconds, partial(self._queue_again, groups))

    def _queue_again(self, groups: Sequence[Group]) -> None:
        for group in reversed(groups):
            del self._leased[group]
            if not self.setting.keep_partial:
                self._counts.lost_tokens += self._tokens_of(group)
                order, group = group.order, self._group(group.prompt, group.attempt)
                group.order = order
            self._queue.appendleft(group)
        self._look()

    def _leave(self, seconds: float) -> None:
        """The trainer is lost with what it computed of the step, and comes back. A publication is made again."""
        publishes = self._phase is Phase.PUBLISH and len(self._taken) == self.setting.prompts
        self._enter(Phase.AWAY)
        self._at(self.now + seconds, partial(self._return, self._turn, publishes))

    def _return(self, turn: int, publishes: bool) -> None:
        if turn != self._turn:
            return
        if publishes:
            self._publish()
            return
        self._part = list(self._taken)
        if self._part and (self.setting.streaming or len(self._taken) == self.setting.prompts):
            self._train()
        else:
            self._enter(Phase.WAIT)
        self._look()

    # What is told.

    def _trained_tokens(self, group: Group) -> float:
        return self.setting.weight * sum(self.setting.prompt_tokens + answer.length for answer in group.answers)

    def _tokens_of(self, group: Group) -> float:
        return self.setting.weight * sum(answer.done for answer in group.answers)

    def _record(self, taken: Sequence[Group]) -> None:
        setting, counts = self.setting, self._counts
        staleness: defaultdict[int, float] = defaultdict(float)
        oldest: defaultdict[int, float] = defaultdict(float)
        for group in taken:
            oldest[self.version - _oldest(group)] += setting.weight * setting.samples
            for answer in group.answers:
                for version, tokens in answer.tokens:
                    staleness[self.version - version] += setting.weight * tokens
        shares = []
        for engine in self._engines:
            engine.advance(self.now)
            there = self.now - max(engine.since, counts.begin_s)
            shares.append((engine.busy_s - self._busy_before.get(engine, 0.0)) / there if there > 0 else 0.0)
            self._busy_before[engine] = engine.busy_s
        self.steps.append(
            Step(
                begin_s=counts.begin_s,
                end_s=self.now,
                trainer_s=counts.trainer_s,
                replica_s=tuple(shares),
                tokens=sum(self._trained_tokens(group) for group in taken),
                answers=setting.weight * setting.samples * len(taken),
                late=counts.late,
                lost_tokens=counts.lost_tokens,
                staleness=dict(staleness),
                oldest=dict(oldest),
                ledger=self.ledger(),
            )
        )
        self._counts = Counts(begin_s=self.now)


def _order(group: Group) -> int:
    return group.order


def _oldest(group: Group) -> int:
    """Version of the oldest token of a complete group."""
    return min(answer.tokens[0][0] for answer in group.answers)
