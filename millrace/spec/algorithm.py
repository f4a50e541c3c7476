"""What is optimised. Names and options are those of `millrace.rl`; see docs/algorithms.md."""

from typing import Any, Literal

from pydantic import Field

from millrace.spec.base import Part


class Choice(Part):
    """A registered function by name, with its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class Algorithm(Part):
    advantage: Choice = Choice(name="grpo")
    policy_loss: Choice = Choice(name="ppo", options={"clip_low": 0.2, "clip_high": 0.28})
    aggregation: str = "token-mean"
    kl: Choice | None = None
    """KL to the reference policy (the model as it was loaded); none: no reference is kept."""
    kl_coefficient: float = Field(0.001, ge=0.0)
    kl_in: Literal["loss", "reward"] = "loss"
    correction: Choice | None = None
    """Of the mismatch between the engine's and the trainer's log-probabilities; none: it is only reported."""
    entropy_coefficient: float = Field(0.0, ge=0.0)
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The proximal policy of the ratio: the trainer's own pass before the first update, or the engine's values."""
    drop_groups_without_signal: bool = False
    """Drop groups whose rewards are all equal and refill the batch (DAPO's dynamic sampling)."""
    max_refills: int = Field(10, ge=0)
    """With the above: at most so many groups are drawn for each one trained, or the job fails and says so."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """DAPO's soft punishment over the last so many tokens before max_response_tokens; 0: none."""
    overlong_penalty: float = Field(1.0, ge=0.0)
