"""Which passes over its tokens a step makes: the trainer makes them, and the planner counts them."""

from dataclasses import dataclass

from millrace.rl.registry.catalogue import AlgorithmKind, find
from millrace.spec.job import JobSpec


@dataclass(frozen=True)
class StepPasses:
    """The updates of a step, and the forward passes before them."""

    updates: int
    """Optimizer updates, each on its share of the tokens."""
    train: bool
    """Log-probabilities of the policy."""
    reference: bool
    values: bool
    """Values of the critic, which has as many updates as the policy."""
    sum_pi_squared: bool
    """A second pass of the policy, at half the temperature."""
    entropies: bool
    """Entropies of the policy, from the pass of `train`."""

    @property
    def policy(self) -> int:
        """Forward passes of the policy."""
        return self.train + self.sum_pi_squared

    @property
    def by_part(self) -> dict[str, int]:
        """The forward passes of the policy and of the reference, by the part of the step whose time they take."""
        return {"old_log_prob": self.policy, "ref": int(self.reference)}


def passes_of(spec: JobSpec, *, updates: int, policy_is_trained: bool = True) -> StepPasses:
    """The passes of a step with so many updates.

    With a single update the policy's own pass would only repeat what the update computes, unless something before the
    update reads its result. Where the policy is not trained, only that pass can be compared with the engine.
    """
    algorithm = spec.algorithm
    recomputed = algorithm.old_logprobs == "recompute"
    inputs = find(AlgorithmKind.ADVANTAGE, algorithm.advantage.name).inputs
    read = {"old_logprobs_bt", "weights_bt"} & inputs
    read |= {"selected_bt"} & find(AlgorithmKind.POLICY_LOSS, algorithm.policy_loss.name).inputs
    in_reward = algorithm.kl is not None and algorithm.kl_in == "reward"
    train = bool(algorithm.corrections) or (recomputed and (updates > 1 or bool(read) or in_reward))
    squares, entropies = "sum_pi_squared_bt" in inputs, algorithm.top_entropy_fraction < 1
    return StepPasses(
        updates=updates,
        train=train or squares or entropies or not policy_is_trained,
        reference=algorithm.kl is not None,
        values=algorithm.critic is not None,
        sum_pi_squared=squares,
        entropies=entropies,
    )
