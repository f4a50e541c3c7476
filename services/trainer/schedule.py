"""A step's learning rate and random numbers: functions of its number, so that resuming needs no other state."""

import hashlib
import math

from millrace.spec import JobSpec


def learning_rate(spec: JobSpec, step: int) -> float:
    """For step 1, 2, ...: rises linearly and reaches `lr` at step `warmup_steps`, then as `schedule` says, falling to
    `min_lr` at the job's last step."""
    chosen = spec.trainer.optimizer
    if step < chosen.warmup_steps:
        return chosen.lr * step / chosen.warmup_steps
    if chosen.schedule == "constant" or spec.schedule.steps is None:
        return chosen.lr
    falling = max(1, spec.schedule.steps - chosen.warmup_steps)
    done = min(1.0, max(0, step - chosen.warmup_steps) / falling)
    share = (1 + math.cos(math.pi * done)) / 2 if chosen.schedule == "cosine" else 1 - done
    return chosen.min_lr + (chosen.lr - chosen.min_lr) * share


def random_seed(spec: JobSpec, step: int, rank: int) -> int:
    """What a data-parallel rank draws in a step begins here: 63 bits, different for each."""
    digest = hashlib.sha256(f"{spec.trainer.seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
