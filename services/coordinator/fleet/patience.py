"""How often members send heartbeats, and after how much silence they are lost: the more members, the more rarely."""

from dataclasses import dataclass

HEARTBEATS_PER_S = 100.0
"""All members together send at most so many, as far as LONGEST_HEARTBEAT_S allows. Each takes about 0.4 ms of the
coordinator's processor time."""
LONGEST_HEARTBEAT_S = 10.0
MISSED = 2.0
"""A member is given so many longer intervals of silence in addition."""


@dataclass(frozen=True)
class Patience:
    """The intervals of a fleet."""

    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0

    def of_fleet(self, members: int) -> "Patience":
        """The intervals for a fleet of so many members; these are for a small one."""
        heartbeat_s = max(self.heartbeat_s, min(members / HEARTBEATS_PER_S, LONGEST_HEARTBEAT_S))
        return Patience(heartbeat_s, self.lost_after_s + MISSED * (heartbeat_s - self.heartbeat_s))
