"""Which passes over its tokens a step makes: the trainer makes them, and the planner counts them. And whether the
trainer can begin with a part of a step's groups, and which rewards its advantages compare."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.backends import BACKENDS
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
    update reads its result. If the policy is not trained, only that pass can be compared with the engine.
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


def compared_rewards(spec: JobSpec) -> Sequence[str]:
    """Names of the separate rewards that the advantage compares within a group, as in `reward.parts`; none if it
    compares the reward."""
    inputs = find(AlgorithmKind.ADVANTAGE, spec.algorithm.advantage.name).inputs
    return spec.reward.parts if "rewards_bk" in inputs else ()


def why_not_streaming(spec: JobSpec) -> str:
    """Why the trainer gets all groups of a step at once; empty where it gets them as they are completed."""
    streaming, staleness = spec.trainer.streaming, spec.schedule.max_staleness
    if streaming is False:
        return "trainer.streaming: false"
    if streaming == "auto" and staleness > 0:
        return f"schedule.max_staleness: {staleness}: replicas generate groups of later steps while the trainer trains"
    return needs_whole_batch(spec)


def needs_whole_batch(spec: JobSpec) -> str:
    """What of the job needs the groups of a whole step before the first of them can be trained, in words; empty if the
    trainer can take them as they are completed (`trainer.streaming`).

    Sums over the batch that only divide the gradient are no such reason: the trainer divides by them at the end. Losses
    get single micro-batches in any case.
    """
    algorithm = spec.algorithm
    advantage = find(AlgorithmKind.ADVANTAGE, algorithm.advantage.name)
    if not advantage.is_separable(algorithm.advantage.options):
        return f"algorithm.advantage: {advantage.name} is computed over the whole batch"
    for chosen in algorithm.corrections:
        if not find(AlgorithmKind.CORRECTION, chosen.name).is_separable(chosen.options):
            return f"algorithm.correction: {chosen.name} is computed over the whole batch"
    if algorithm.corrections and algorithm.normalize_correction_weights:
        return "algorithm.normalize_correction_weights: the weights are divided by their mean over the batch"
    if "selected_bt" in find(AlgorithmKind.POLICY_LOSS, algorithm.policy_loss.name).inputs:
        return f"algorithm.policy_loss: {algorithm.policy_loss.name} selects tokens over the whole batch"
    if algorithm.top_entropy_fraction < 1:
        return "algorithm.top_entropy_fraction: the tokens are those of the highest entropy in the whole batch"
    if (lora := spec.model.lora) is not None and lora.dropout > 0:
        return "model.lora.dropout: the random numbers of a step depend on its parts"
    backend = BACKENDS[spec.trainer.backend]
    sections = [spec.trainer] if algorithm.critic is None else [spec.trainer, spec.trainer.of("critic")]
    options = (backend.options.model_validate(section.backend_options) for section in sections)
    return next((reason for each in options if (reason := backend.needs_whole_batch(each))), "")
