"""A step's learning rates and random numbers: functions of its number, so that resuming needs no other state."""

import hashlib
import math

from millrace.spec import JobSpec
from millrace.spec.trainer import Optimizer


def learning_rate(spec: JobSpec, step: int) -> float:
    """The policy's for step 1, 2, ...; its schedule begins once the critic is warm."""
    before = 0 if spec.algorithm.critic is None else spec.algorithm.critic.warmup_steps
    last = None if spec.schedule.steps is None else spec.schedule.steps - before
    return _rate(spec.trainer.optimizer, step - before, last)


def critic_learning_rate(spec: JobSpec, step: int) -> float:
    """The critic's for step 1, 2, ..."""
    assert spec.algorithm.critic is not None
    return _rate(spec.algorithm.critic.optimizer, step, spec.schedule.steps)


def _rate(chosen: Optimizer, step: int, last: int | None) -> float:
    """Rises linearly and reaches `lr` at step `warmup_steps`, then as `schedule` says, to `min_lr` at step `last`."""
    if step < chosen.warmup_steps:
        return chosen.lr * step / chosen.warmup_steps
    if chosen.schedule == "constant" or last is None:
        return chosen.lr
    falling = max(1, last - chosen.warmup_steps)
    done = min(1.0, max(0, step - chosen.warmup_steps) / falling)
    share = (1 + math.cos(math.pi * done)) / 2 if chosen.schedule == "cosine" else 1 - done
    return chosen.min_lr + (chosen.lr - chosen.min_lr) * share


def random_seed(spec: JobSpec, step: int, rank: int) -> int:
    """What a data-parallel rank draws in a step begins here: 63 bits, different for each."""
    digest = hashlib.sha256(f"{spec.trainer.seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
