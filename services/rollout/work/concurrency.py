"""How many slots of an engine are used: fewer where its cache is too small for all of them at once."""

from dataclasses import dataclass, field

DECREASE = 0.8
"""Part of the slots that is left after a preemption."""


@dataclass
class Concurrency:
    """The slots of an engine that may be used. An engine whose cache is full preempts a request and computes it again
    later, from its beginning. Then fewer slots are used, and one more each time that all of them have ended without a
    preemption (additive increase, multiplicative decrease)."""

    capacity: int
    """Slots of the engine."""
    preempted: int = 0
    """Requests that the engine had preempted when it was last looked at, counted since it started."""
    _slots: float = field(init=False)
    _in_effect: bool = field(default=True, init=False)
    """Whether no more episodes than `slots` have generated at some time since the last decrease."""

    def __post_init__(self) -> None:
        self._slots = float(self.capacity)

    @property
    def slots(self) -> int:
        """Episodes that may generate at the same time, from 1 to `capacity`."""
        return int(self._slots)

    def look(self, preempted: int, generating: int) -> None:
        """The engine has preempted so many requests since it started, and so many episodes have a slot now."""
        self._in_effect = self._in_effect or generating <= self.slots
        # While more generate than the last decrease allows, a preemption says nothing of that decrease.
        if preempted > self.preempted and self._in_effect:
            self._slots = max(1.0, min(self._slots, generating) * DECREASE)
            self._in_effect = generating <= self.slots
        self.preempted = preempted

    def ended(self) -> None:
        """A sample has ended."""
        self._slots = min(float(self.capacity), self._slots + 1.0 / max(1.0, self._slots))
