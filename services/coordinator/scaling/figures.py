"""What a pool did lately: for which share of the time the trainer waited and the replicas generated. Pure.

The pool is looked at about once a second. A look counts for the time until the next one. What was seen is added up for
each step, since a part of a step says nothing: in one part the trainer works, in another the replicas.
"""

from collections import deque
from dataclasses import dataclass

from millrace.ids import JobId
from services.coordinator.scaling.decision import Seen

LEAST_STEPS = 3
"""Whole steps that are measured, however long they take."""
MOST_STEPS = 5000
"""Whole steps that are kept."""
MUCH_LONGER = 2.0
PATIENCE_S = 300.0
"""A step that takes longer may be measured before its end."""
LONGEST_LOOK_S = 10.0
"""A look counts for at most so long: the coordinator may have stood still."""


@dataclass(frozen=True)
class Look:
    """The pool at one moment."""

    at: float
    """Seconds of a steady clock."""
    job: JobId | None
    """The job that needs replicas."""
    step: int
    """Steps that it has trained."""
    waits: bool
    """Whether its trainer waits for groups."""
    ready: int
    busy: int
    """Ready replicas that generate."""
    running: int
    """Samples that they generate, all together."""
    fullest: int
    """The most that one of them generates."""
    coming: int
    prompts: int
    """Prompts that are queued or leased."""


@dataclass
class Stretch:
    """A step, or the part of it in which the pool did not change."""

    whole: bool
    seconds: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    """Added up over the replicas."""
    replica_s: float = 0.0
    sample_s: float = 0.0
    """Running samples, added up over time."""
    fullest: int = 0
    prompts: int = 0

    def add(self, look: Look, seconds: float) -> None:
        """Counts what was seen for `seconds`."""
        seen = Stretch(
            whole=False,
            seconds=seconds,
            wait_s=seconds * look.waits,
            busy_s=seconds * look.busy,
            replica_s=seconds * look.ready,
            sample_s=seconds * look.running,
            fullest=look.fullest,
            prompts=look.prompts,
        )
        self.join(seen)

    def join(self, other: "Stretch") -> None:
        """Adds another one."""
        self.seconds += other.seconds
        self.wait_s += other.wait_s
        self.busy_s += other.busy_s
        self.replica_s += other.replica_s
        self.sample_s += other.sample_s
        self.fullest = max(self.fullest, other.fullest)
        self.prompts = max(self.prompts, other.prompts)


class Figures:
    """The newest steps of one job on an unchanged pool."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: seconds that are measured at most, if steps are short."""
        self._longest_s = longest_s
        self._last: Look | None = None
        self._open = Stretch(whole=False)
        self._whole: deque[Stretch] = deque(maxlen=MOST_STEPS)
        self._whole_s = 0.0
        self._began: float | None = None
        """Time at which the step in progress began; None if that was not seen."""
        self._step_s = 0.0
        """How long the last step took, whatever the pool was."""

    def add(self, look: Look) -> None:
        """Takes in the next look."""
        last, self._last = self._last, look
        if last is None:
            return
        self._open.add(last, min(max(0.0, look.at - last.at), LONGEST_LOOK_S))
        if look.job != last.job:
            self._began, self._step_s = None, 0.0
        elif look.step != last.step:
            self._step_s = look.at - self._began if self._began is not None else self._step_s
            self._began = look.at
        if (look.job, look.ready) != (last.job, last.ready):
            self._whole.clear()
            self._whole_s, self._open = 0.0, Stretch(whole=False)
        elif look.step != last.step:
            if self._open.whole:
                self._keep(self._open)
            self._open = Stretch(whole=True)

    def _keep(self, stretch: Stretch) -> None:
        if len(self._whole) == MOST_STEPS:
            self._whole_s -= self._whole.popleft().seconds
        self._whole.append(stretch)
        self._whole_s += stretch.seconds
        while len(self._whole) > LEAST_STEPS and self._whole_s - self._whole[0].seconds >= self._longest_s:
            self._whole_s -= self._whole.popleft().seconds

    def seen(self, window_s: float) -> Seen:
        """What was measured in the newest whole steps, at least LEAST_STEPS and `window_s`, as far as there are so
        many. The step in progress counts if it takes longer than they did, and much longer than the last one. Raises
        ValueError before the first look."""
        if self._last is None:
            raise ValueError("nothing was looked at yet")
        look, total, steps = self._last, Stretch(whole=False), 0
        for stretch in reversed(self._whole):
            if steps >= LEAST_STEPS and total.seconds >= window_s:
                break
            total.join(stretch)
            steps += 1
        if self._open.seconds > max(total.seconds, MUCH_LONGER * self._step_s, PATIENCE_S):
            total.join(self._open)
        return Seen(
            now=look.at,
            works=look.job is not None,
            ready=look.ready,
            coming=look.coming,
            prompts=max(total.prompts, self._open.prompts, look.prompts),
            wait=total.wait_s / total.seconds if total.seconds else 0.0,
            busy=total.busy_s / total.replica_s if total.replica_s else 0.0,
            load=total.sample_s / (total.fullest * total.replica_s) if total.fullest and total.replica_s else 0.0,
            steps=steps,
            seconds=total.seconds,
        )
