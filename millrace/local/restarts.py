"""How often, and how soon, a process that died is started again."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Restarts:
    """Each restart comes after a longer wait than the one before, up to a bound.

    A process that dies before it has joined the fleet cannot run here: it is started again at most `limit` times within
    `window_s`. One that had joined is always started again. What it died of may be a job's fault, and it is the
    coordinator that counts the deaths of each job and ends the job, not the service.
    """

    limit: int = 5
    window_s: float = 600.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0
    longest_wait_joined_s: float = 3.0
    """Bound of the wait after a life that had joined: another job may wait for the service."""
    _when: deque[tuple[float, bool]] = field(default_factory=deque)

    def wait_s(self, now_s: float, *, joined: bool = False) -> float | None:
        """Seconds to wait before the restart of a process that died at `now_s`, after it had `joined` the fleet or
        not; None: give up."""
        while self._when and now_s - self._when[0][0] > self.window_s:
            self._when.popleft()
        if not joined and self.used >= self.limit:
            return None
        longest = self.longest_wait_joined_s if joined else self.longest_wait_s
        doublings = min(len(self._when), 30)
        self._when.append((now_s, joined))
        return min(longest, self.first_wait_s * 2.0**doublings)

    @property
    def used(self) -> int:
        """Restarts within the window that count against the limit."""
        return sum(not joined for _, joined in self._when)

    @property
    def told(self) -> str:
        """The last restart, for people."""
        if self._when and self._when[-1][1]:
            return f"{len(self._when)} times in {self.window_s / 60:g} min"
        return f"{self.used} of {self.limit} times"
