"""How often, and how soon, a process that died is started again."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Restarts:
    """At most `limit` restarts within `window_s`, each after a longer wait than the one before."""

    limit: int = 5
    window_s: float = 600.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0
    _when: deque[float] = field(default_factory=deque)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds to wait before the restart of a process that died at `now_s`; none: give up."""
        while self._when and now_s - self._when[0] > self.window_s:
            self._when.popleft()
        if len(self._when) >= self.limit:
            return None
        wait_s = min(self.longest_wait_s, self.first_wait_s * 2.0 ** len(self._when))
        self._when.append(now_s)
        return wait_s

    @property
    def used(self) -> int:
        return len(self._when)
