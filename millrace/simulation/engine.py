"""One replica: requests that run together, each of which gets a token in every step of the engine.

Between two events the number of running requests is constant and so is the time of a step. `progress` counts steps: a
request that starts at progress p and has n tokens ends at p + n.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from millrace.simulation.setting import Setting, StalenessOf

NEAR = 1e-6
"""Tokens that a request may lack at its end: rounding."""


@dataclass(eq=False)
class Group:
    """The answers to a prompt."""

    prompt: int
    attempt: int = 0
    order: int = 0
    """Counts the prompts as they are issued."""
    left: int = 0
    """Answers that are not complete."""
    answers: list["Answer"] = field(default_factory=list)


@dataclass(eq=False)
class Answer:
    group: Group
    length: float
    tokens: list[tuple[int, float]] = field(default_factory=list)
    """How many tokens each version generated, ascending by version."""
    begun: float = 0.0
    """Progress of its engine at its first token there, or at the last publication."""

    @property
    def done(self) -> float:
        """Tokens that are generated."""
        return sum(count for _, count in self.tokens)

    def staleness(self, version: int, of: StalenessOf) -> float:
        """How stale the complete answer is at the trainer's `version`."""
        if of is StalenessOf.VERSIONS:
            return len(self.tokens) - 1
        if of is StalenessOf.MEAN:
            return version - sum(each * count for each, count in self.tokens) / self.done
        return version - self.tokens[0][0]


class Engine:
    """See the module's docstring."""

    def __init__(self, setting: Setting, now: float, version: int) -> None:
        self.setting = setting
        self.version = version
        self.since = now
        self.busy_s = 0.0
        """Seconds with at least one request."""
        self.most_running = 0
        self.generated = 0.0
        self.stamp = 0
        """Counts what changed the time of the next end: events with an older stamp are void."""
        self._clock = now
        self._stall_s = 0.0
        """Seconds of reading and pausing that are to pass before the next token."""
        self._running: list[tuple[float, int, Answer]] = []
        self._waiting: deque[Answer] = deque()
        self._read: set[Group] = set()
        """The groups whose prompt is in the cache."""
        self._progress = 0.0
        self._held = 0.0
        """Tokens in the cache."""
        self._step_s = 0.0
        self._started = 0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def advance(self, now: float) -> None:
        """Lets the time pass until `now`."""
        elapsed, self._clock = now - self._clock, now
        stalled = min(self._stall_s, elapsed)
        self._stall_s -= stalled
        if self._running:
            self.busy_s += elapsed
            steps = (elapsed - stalled) / self._step_s
            self._progress += steps
            self._held += self.setting.weight * len(self._running) * steps

    def next_end(self) -> float:
        """When the next answer is complete, unless something changes before."""
        self.stamp += 1
        if not self._running:
            return math.inf
        steps, count = max(0.0, self._running[0][0] - self._progress), len(self._running) * self.setting.weight
        self._step_s = self.setting.engine.decode(count, self._held + count * steps / 2)
        return self._clock + self._stall_s + steps * self._step_s

    def take(self, group: Group) -> None:
        """Queues the answers of a prompt that are not complete."""
        self._waiting.extend(answer for answer in group.answers if answer.length - answer.done > NEAR)

    def start(self) -> None:
        """Starts what waits, as far as there are slots, and room in the cache for the given tokens."""
        setting = self.setting
        while self._waiting:
            done = self._waiting[0].done
            given = setting.weight * (setting.state_tokens + setting.prompt_tokens + done)
            full = (len(self._running) + 1) * setting.weight > max(setting.slots, setting.weight)
            if self._running and (full or self._held + given > setting.cached_tokens):
                return
            answer = self._waiting.popleft()
            if answer.group not in self._read:
                self._read.add(answer.group)  # the other answers find their prompt in the cache
                self._stall_s += setting.engine.prefill(setting.weight * setting.prompt_tokens)
                self._stall_s += setting.weight * setting.prompt_s
            self._stall_s += setting.engine.prefill(setting.weight * done)
            answer.begun = self._progress
            self._started += 1
            heapq.heappush(self._running, (self._progress + answer.length - done, self._started, answer))
            self._held += given
            self.most_running = max(self.most_running, len(self._running))

    def ended(self) -> list[Answer]:
        """Takes out the answers that are complete."""
        found = []
        while self._running and self._running[0][0] <= self._progress + NEAR:
            _, _, answer = heapq.heappop(self._running)
            self._mark(answer)
            self.generated += self.setting.weight * answer.length
            self._held -= self.setting.weight * (self.setting.state_tokens + self.setting.prompt_tokens + answer.length)
            answer.group.left -= 1
            if not answer.group.left:
                self._read.discard(answer.group)
            found.append(answer)
        if not self._running:
            self._held = 0.0
        return found

    def commit(self, version: int) -> None:
        """Puts a version in place: the tokens after it are the new version's."""
        for _, _, answer in self._running:
            self._mark(answer)
        self.version = version
        self._stall_s += self.setting.pause_s
        if self.setting.recompute_cache and self._running:
            states = self.setting.weight * self.setting.state_tokens * len(self._running)
            self._stall_s += self.setting.engine.prefill(self._held - states)
            groups = len({answer.group for _, _, answer in self._running})
            self._stall_s += groups * self.setting.weight * self.setting.prompt_s

    def stop(self) -> list[Group]:
        """Ends everything, and returns the groups that were not complete, in the order in which they came."""
        for _, _, answer in self._running:
            self._mark(answer)
        held = [answer for _, _, answer in sorted(self._running, key=lambda each: each[1])] + list(self._waiting)
        lost = list(dict.fromkeys(answer.group for answer in held))
        self._running.clear()
        self._waiting.clear()
        return lost

    def _mark(self, answer: Answer) -> None:
        tokens, answer.begun = self._progress - answer.begun, self._progress
        if tokens > 0:
            answer.tokens.append((self.version, tokens))
