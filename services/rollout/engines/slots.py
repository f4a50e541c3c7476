"""How long a sample waits in an engine that runs a bounded number at once, in the order in which they came."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Ticket:
    """A sample in the engine."""

    came_at: float
    began_at: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds without a slot so far."""
        return (time.monotonic() if self.began_at is None else self.began_at) - self.came_at


class Slots:
    """Follows the samples in an engine: each has a slot as soon as fewer than `capacity()` before it have one. An
    engine that lacks memory for as many lets samples wait longer than this says."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._inside: dict[Ticket, None] = {}
        """The samples in the engine, in the order in which they came."""

    def enter(self) -> Ticket:
        """A sample begins."""
        ticket = Ticket(time.monotonic())
        self._inside[ticket] = None
        self._give()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The sample has ended."""
        if ticket.began_at is None:
            ticket.began_at = time.monotonic()
        del self._inside[ticket]
        self._give()

    def _give(self) -> None:
        """Gives free slots to the first that have none."""
        for number, ticket in enumerate(self._inside):
            if number >= self._capacity():
                return
            if ticket.began_at is None:
                ticket.began_at = time.monotonic()
