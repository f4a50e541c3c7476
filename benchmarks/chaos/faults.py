"""Which faults a seed stands for. Pure: the same arguments give the same faults."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
    """A kind of process of the job."""

    COORDINATOR = "coordinator"
    REDIS = "Redis"
    LAUNCHER = "trainer's launcher"
    """The process that starts the ranks and waits for them."""
    RANK = "trainer rank"
    REPLICA = "replica"
    ENGINE = "engine process"
    """A process of an engine that has its own: vLLM's core and workers."""
    SCORER = "scorer"


class Act(StrEnum):
    """What is done to a process."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"
    """SIGCONT follows, unless the process was ended meanwhile because it was silent for too long."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    target: Target
    act: Act
    which: float
    """Which of the target's processes, as a fraction of their number, in [0, 1)."""
    after_s: float
    """Seconds from the recovery of the fault before this one."""
    stopped_s: float
    """Seconds from SIGSTOP to SIGCONT; 0 for the other acts."""


LATEST_S = 4.0
"""Longest wait before a fault: a few steps of the job."""
SHORT_STOP_S = (0.2, 4.0)
LONG_STOP_S: dict[Target, float] = {Target.RANK: 60.0, Target.REPLICA: 60.0, Target.ENGINE: 60.0}
"""A long stop lasts until the process is ended as lost, at most this long; 12 s where nothing counts it as lost."""
LONG_SHARE = 1 / 3
ENDINGS_PER_SERVICE = 4
"""The local stack starts a service again at most 5 times in 10 minutes."""
SERVICE = {Target.LAUNCHER: Target.RANK, Target.ENGINE: Target.REPLICA}
"""Targets that end together with another one."""


def draw(seed: int, count: int, targets: Sequence[Target]) -> list[Fault]:
    """`count` faults. No service is ended so often that the stack gives it up."""
    rng = random.Random(f"faults {seed}")
    endings: Counter[Target] = Counter()
    faults: list[Fault] = []
    while len(faults) < count:
        fault = _fault(rng, targets)
        service = SERVICE.get(fault.target, fault.target)
        ends = fault.act is not Act.STOP or fault.stopped_s > SHORT_STOP_S[1]
        if ends and service is not Target.SCORER and endings[service] == ENDINGS_PER_SERVICE:
            continue
        endings[service] += ends
        faults.append(fault)
    return faults


def _fault(rng: random.Random, targets: Sequence[Target]) -> Fault:
    target, act = rng.choice(targets), rng.choice(list(Act))
    which, after_s, length = rng.random(), rng.uniform(0.0, LATEST_S), rng.uniform(*SHORT_STOP_S)
    if rng.random() < LONG_SHARE:
        length = LONG_STOP_S.get(target, 12.0)
    return Fault(target, act, which, after_s, length if act is Act.STOP else 0.0)


def staleness(seed: int) -> int:
    """The staleness bound of a seed's job: 0, 1 or 2."""
    return random.Random(f"staleness {seed}").randrange(3)
