"""What is optimised. Names and options are those of `millrace.rl`; see docs/algorithms.md."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from millrace.spec import presets
from millrace.spec.trainer import Optimizer
from millrace.validation.fields import OneOf
from millrace.validation.model import StrictModel


class Choice(StrictModel):
    """A registered function by name, with its options. Plain text is a name without options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"clip_high": 0.28}])

    @model_validator(mode="before")
    @classmethod
    def by_name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class Critic(StrictModel):
    """The value model of PPO: the policy's architecture with one number a token in place of the logits."""

    path: str | None = None
    """Hugging Face folder that it starts from, with a head of its own (`score`) or without one, which then starts at
    0; none: the policy's folder."""
    clip: float | None = Field(0.5, gt=0.0)
    """A value moves at most so far from what it was before the step, or its loss stops rewarding it; none: no bound."""
    warmup_steps: int = Field(0, ge=0)
    """The first so many steps train the critic alone."""
    optimizer: Optimizer = Field(Optimizer(lr=1e-5), examples=[{"lr": 1e-5}])
    """The critic's."""


class Algorithm(StrictModel):
    """Every name, its formula and its options: docs/algorithms.md. A function of your own is named as
    `/path/to/file.py:function`."""

    preset: Annotated[str, OneOf(presets.names())] | None = None
    """A method by the name that people say: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++, ppo. What is given
    beside it takes the place of the preset's."""
    advantage: Choice = Field(Choice(name="grpo"), examples=[{"name": "grpo"}])
    """From rewards to advantages."""
    policy_loss: Choice = Field(
        Choice(name="ppo", options={"clip_low": 0.2, "clip_high": 0.28}),
        examples=[{"name": "ppo", "options": {"clip_high": 0.28}}],
    )
    """The loss of a token."""
    aggregation: str = "token-mean"
    """From the losses of tokens to one number."""
    critic: Critic | None = Field(None, examples=[{"clip": 0.5}])
    """For advantages that read values (`gae`); none: no value model is kept."""
    kl: Choice | None = Field(None, examples=[{"name": "k3"}])
    """KL to the reference policy (the model as it was loaded); none: no reference is kept."""
    kl_coefficient: float = Field(0.001, ge=0.0)
    """Its weight."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from each token's reward."""
    kl_target: float | None = Field(None, gt=0.0)
    """Mean KL a token, nats, that the coefficient, above 0, is steered to from step to step; none: it stays as it
    is."""
    kl_horizon: int = Field(10000, ge=1)
    """With the above: trajectories over which an error is corrected."""
    correction: Choice | None = Field(None, examples=[{"name": "tis_token"}])
    """Of the mismatch between the engine's and the trainer's log-probabilities; none: it is only reported. Needs
    rollout.top_p and top_k that keep every token."""
    entropy_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the entropy, which is subtracted from the loss."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The proximal policy of the ratio: the trainer's own pass before the first update, or the engine's values, which
    need rollout.top_p and top_k that keep every token, and no correction by weights."""
    router_replay: bool = False
    """Of models with experts: the trainer sends each token to the experts that the engine sent it to (arXiv
    2510.11370), so that a choice that tipped over on the way is no mismatch."""
    drop_groups_without_signal: bool = False
    """Drop groups whose rewards are all equal and refill the batch (DAPO's dynamic sampling)."""
    max_refills: int = Field(10, ge=0)
    """With the above: at most so many groups are drawn for each one trained, or the job fails and says so."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """DAPO's soft punishment over the last so many tokens before max_response_tokens; 0: none."""
    overlong_penalty: float = Field(1.0, ge=0.0)
    """What a response of full length loses by it."""

    @model_validator(mode="before")
    @classmethod
    def over_its_preset(cls, given: Any) -> Any:
        return presets.over_preset(given) if isinstance(given, dict) else given
