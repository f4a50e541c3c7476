"""The coefficient of the KL to the reference: besides the models, the only state that a step leaves to the next."""

from dataclasses import dataclass

from torch import Tensor

from millrace.rl.formulas.divergence import adapted, kl
from millrace.spec import JobSpec
from services.trainer.step.batch import RankBatch


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


def mean_kl(spec: JobSpec, batch: RankBatch, logprobs_bt: Tensor, ref_bt: Tensor, mask_bt: Tensor) -> float:
    """Mean KL to the reference over the mask's tokens of all ranks, in nats, for the weights that the step began with.
    A collective."""
    assert spec.algorithm.kl is not None
    kl_bt = batch.gather(kl(spec.algorithm.kl.name, logprobs_bt, ref_bt))
    tokens = kl_bt[batch.gather(mask_bt)].double()
    return float(tokens.mean()) if tokens.numel() else 0.0
