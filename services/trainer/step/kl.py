"""The coefficient of the KL to the reference: the one thing beside the models that a step leaves to the next."""

from dataclasses import dataclass

from torch import Tensor

from millrace.rl.formulas.divergence import adapted, kl
from millrace.spec import JobSpec
from services.trainer.step.batch import RankBatch


@dataclass
class KlCoefficient:
    """Of a job as far as it is."""

    value: float

    def of(self, spec: JobSpec) -> JobSpec:
        """The job with this coefficient."""
        algorithm = spec.algorithm.model_copy(update={"kl_coefficient": self.value})
        return spec.model_copy(update={"algorithm": algorithm})

    def follow(self, spec: JobSpec, observed: float, samples: int) -> None:
        """Moves on after a step of `samples` trajectories whose mean KL was `observed`, where the job has a target."""
        algorithm = spec.algorithm
        if algorithm.kl_target is not None:
            self.value = adapted(
                self.value,
                observed=observed,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
                samples=samples,
            )


def observed(spec: JobSpec, batch: RankBatch, logprobs_bt: Tensor, ref_bt: Tensor, mask_bt: Tensor) -> float:
    """Mean over the tokens of the mask of all ranks, of the weights that the step began with; nats. A collective."""
    assert spec.algorithm.kl is not None
    kl_bt = batch.whole(kl(spec.algorithm.kl.name, logprobs_bt, ref_bt))
    tokens = kl_bt[batch.whole(mask_bt)].double()
    return float(tokens.mean()) if tokens.numel() else 0.0
