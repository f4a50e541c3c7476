"""Learning rates and random seeds of a step: functions of its number, so that resuming needs no other state."""

import hashlib
import math

from millrace.spec import JobSpec
from millrace.spec.trainer import Optimizer


def learning_rate(spec: JobSpec, step: int) -> float:
    """The policy's learning rate in step 1, 2, ...; its schedule begins after the critic's warm-up."""
    before = 0 if spec.algorithm.critic is None else spec.algorithm.critic.warmup_steps
    last = None if spec.schedule.steps is None else spec.schedule.steps - before
    return _rate(spec.trainer.optimizer, step - before, last)


def critic_learning_rate(spec: JobSpec, step: int) -> float:
    """The critic's learning rate in step 1, 2, ..."""
    assert spec.algorithm.critic is not None
    return _rate(spec.algorithm.critic.optimizer, step, spec.schedule.steps)


def _rate(chosen: Optimizer, step: int, last: int | None) -> float:
    """The rate rises linearly to `lr` at step `warmup_steps`, then follows `schedule` to `min_lr` at step `last`."""
    if step < chosen.warmup_steps:
        return chosen.lr * step / chosen.warmup_steps
    if chosen.schedule == "constant" or last is None:
        return chosen.lr
    falling = max(1, last - chosen.warmup_steps)
    done = min(1.0, max(0, step - chosen.warmup_steps) / falling)
    share = (1 + math.cos(math.pi * done)) / 2 if chosen.schedule == "cosine" else 1 - done
    return chosen.min_lr + (chosen.lr - chosen.min_lr) * share


def random_seed(spec: JobSpec, step: int, rank: int) -> int:
    """The seed of a data-parallel rank in a step: 63 bits, different for each rank and step."""
    digest = hashlib.sha256(f"{spec.trainer.seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
