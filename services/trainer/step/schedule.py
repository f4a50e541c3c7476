"""Learning rates, random seeds and the coefficient of the KL to the reference in each step. Rates and seeds are
functions of the number of the step; the coefficient is, besides the models, the only state that a step leaves to the
next."""

import hashlib
import math
from dataclasses import dataclass

from torch import Tensor

from millrace.rl.formulas.divergence import adapted, kl
from millrace.spec import JobSpec
from millrace.spec.trainer import Optimizer


@dataclass
class KlCoefficient:
    """The coefficient of a job after the steps made so far."""

    value: float

    def applied_to(self, spec: JobSpec) -> JobSpec:
        """The job spec with this coefficient."""
        algorithm = spec.algorithm.model_copy(update={"kl_coefficient": self.value})
        return spec.model_copy(update={"algorithm": algorithm})

    def follow(self, spec: JobSpec, observed: float, samples: int) -> None:
        """Adapts the coefficient to the mean KL `observed` in a step, if the job has a target for it."""
        algorithm = spec.algorithm
        if algorithm.kl_target is not None:
            self.value = adapted(
                self.value,
                observed=observed,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
                samples=samples,
            )


def mean_kl(estimator: str, logprobs_bt: Tensor, ref_bt: Tensor, mask_bt: Tensor) -> float:
    """Mean KL to the reference over the mask's tokens, in nats; 0 if there are none."""
    tokens = kl(estimator, logprobs_bt, ref_bt)[mask_bt].double()
    return float(tokens.mean()) if tokens.numel() else 0.0


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


def random_seed(spec: JobSpec, step: int, rank: int, part: int = 0) -> int:
    """The seed of a data-parallel rank in a part of a step: 63 bits, different for each rank, step and part."""
    place = f"{step}/{rank}" if part == 0 else f"{step}/{rank}/{part}"
    digest = hashlib.sha256(f"{spec.trainer.seed}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
