"""What is optimised. The functions and their options are in `millrace.rl`; see docs/algorithms.md."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, WrapValidator, model_validator

from millrace.spec import presets
from millrace.spec.trainer import Optimizer
from millrace.validation import limits
from millrace.validation.fields import OneOf, StrictModel


class Choice(StrictModel):
    """A function by name, with its options. Plain text is a name without options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"clip_high": 0.28}])

    @model_validator(mode="before")
    @classmethod
    def by_name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


MOST_CORRECTIONS = 8


def _one_or_several(given: Any, _: Any) -> Any:
    """A list is several functions, anything else is one."""
    return (_SEVERAL if isinstance(given, list | tuple) else _ONE).validate_python(given)


_ONE: TypeAdapter[Choice | None] = TypeAdapter(Choice | None)
_SEVERAL: TypeAdapter[tuple[Choice, ...]] = TypeAdapter(
    Annotated[tuple[Choice, ...], Field(min_length=1, max_length=MOST_CORRECTIONS)]
)


class Critic(StrictModel):
    """The value model of PPO: the policy's architecture with one number per token instead of logits."""

    path: str | None = None
    """Hugging Face folder that the critic starts from; null: the policy's folder. Without a value head of its own
    (`score`) in that folder, the head starts at 0."""
    clip: float | None = Field(0.5, ge=limits.SMALLEST_POSITIVE, le=limits.LARGEST_NUMBER)
    """How far a value may move from its value before the step before the loss stops rewarding the move; null: no
    limit."""
    warmup_steps: int = Field(0, ge=0, le=limits.MOST_STEPS)
    """Number of first steps that train only the critic."""
    optimizer: Optimizer = Field(Optimizer(lr=1e-5), examples=[{"lr": 1e-5}])
    """Optimizer of the critic."""


class Distillation(StrictModel):
    """On-policy distillation: the replicas of a pool score the tokens that the policy sampled, and the policy is
    trained towards their probabilities. docs/distillation.md."""

    pool: str = Field(examples=["teacher"])
    """Name of the pool in `pools` whose replicas are the teacher."""
    loss: Choice = Field(Choice(name="k1"), examples=[{"name": "k1", "options": {"cap": 5.0}}])
    """How the difference to the teacher becomes the loss of a token: k1, k3 or forward_kl_topk."""
    coefficient: float = Field(1.0, ge=limits.SMALLEST_POSITIVE, le=limits.LARGEST_WEIGHT)
    """Weight of the loss."""
    use_rewards: bool = False
    """Whether it is added to the policy loss of the rewards. If not, the rewards are only reported."""
    top_k: int = Field(32, ge=1, le=1024)
    """Most likely tokens that the teacher reports in each place, for losses that read them. Each costs 8 bytes for each
    sampled token on the way to the trainer."""


class Algorithm(StrictModel):
    """docs/algorithms.md has every function with its formula and its options. A function of your own is named as
    `/path/to/file.py:function`."""

    preset: Annotated[str, OneOf(presets.names())] | None = None
    """A published method by its usual name. Every other field of this section that is given replaces the preset's
    value."""
    advantage: Choice = Field(Choice(name="grpo"), examples=[{"name": "grpo"}])
    """How advantages are computed from rewards."""
    policy_loss: Choice = Field(
        Choice(name="ppo", options={"clip_low": 0.2, "clip_high": 0.28}),
        examples=[{"name": "ppo", "options": {"clip_high": 0.28}}],
    )
    """How the loss of each token is computed."""
    top_entropy_fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the step's tokens, those of the highest entropy, whose policy loss counts; that of the others is 0
    (arXiv 2506.01939, which uses 0.2). 1: all tokens."""
    off_policy_limit: float | None = Field(None, gt=0.0, le=100.0)
    """Tokens with a negative advantage have no policy loss in answers whose mean log-probability by the engine exceeds
    that by the policy by more than this number of nats a token (DeepSeek-V3.2, arXiv 2512.02556); null: no limit. Needs
    values of rollout.top_p and top_k that keep every token."""
    aggregation: str = "token-mean"
    """How the losses of all tokens become one number."""
    critic: Critic | None = Field(None, examples=[{"clip": 0.5}])
    """Value model, for advantages that read values (`gae`); null: no value model."""
    kl: Choice | None = Field(None, examples=[{"name": "k3"}])
    """Estimator of the KL to the reference policy, which is the model as it was loaded; null: no reference policy."""
    kl_coefficient: float = Field(0.001, ge=0.0, le=limits.LARGEST_WEIGHT)
    """Weight of the KL in the loss or in the reward."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Use of the KL: added to the loss, or subtracted from the reward of each token."""
    kl_target: float | None = Field(None, ge=limits.SMALLEST_POSITIVE, le=limits.LARGEST_WEIGHT)
    """Mean KL per token, in nats, that `kl_coefficient` is adjusted to reach, from step to step; null: the coefficient
    stays constant."""
    kl_horizon: int = Field(10000, ge=1, le=1_000_000_000)
    """Number of trajectories over which a deviation from `kl_target` is corrected."""
    correction: Annotated[Choice | tuple[Choice, ...] | None, WrapValidator(_one_or_several)] = Field(
        None, examples=[{"name": "tis_token"}]
    )
    """How the mismatch between the engine's and the trainer's log-probabilities is corrected; null: it is only
    reported. A list applies several: one that gives weights, and any number that reject, of which a token has to pass
    each. Needs values of rollout.top_p and top_k that keep every token."""
    normalize_correction_weights: bool = False
    """Whether the weights of the correction are divided by their mean over the step, so that they change no step's
    size; over sequences for weights by sequence."""
    count_rejected_sequences: bool = True
    """Whether answers that the correction rejects whole still count in the divisor of the `seq-mean-*` aggregations, as
    in verl and NeMo-RL. false: the mean is over the answers that are kept, which makes steps larger."""
    distillation: Distillation | None = Field(None, examples=[{"pool": "teacher"}])
    """Training towards a teacher on the policy's own samples, alone or beside the rewards; null: no teacher."""
    entropy_coefficient: float = Field(0.0, ge=0.0, le=limits.LARGEST_WEIGHT)
    """Weight of the entropy, which is subtracted from the loss."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Log-probabilities of the old policy in the ratio. recompute: from the trainer's own pass before the first update.
    rollout: the engine's values, which need values of rollout.top_p and top_k that keep every token, and no correction
    by weights."""
    router_replay: bool = False
    """For mixture-of-experts models: the trainer sends each token to the experts that the engine chose (arXiv
    2510.11370), so that rounding in the router causes no mismatch."""
    drop_groups_without_signal: bool = False
    """Whether groups whose rewards are all equal are dropped and replaced (DAPO's dynamic sampling)."""
    max_refills: int = Field(10, ge=0, le=10_000)
    """Most groups that are generated for each one that is trained before the job fails; for
    `drop_groups_without_signal`."""
    overlong_buffer_tokens: int = Field(0, ge=0, le=limits.MOST_TOKENS)
    """DAPO's soft penalty: number of tokens before max_response_tokens over which the penalty grows; 0: no penalty."""
    overlong_penalty: float = Field(1.0, ge=0.0, le=limits.LARGEST_WEIGHT)
    """Penalty of an answer of full length; for `overlong_buffer_tokens`."""

    @property
    def corrections(self) -> tuple[Choice, ...]:
        """The corrections of `correction`, none, one or several."""
        if self.correction is None or isinstance(self.correction, tuple):
            return self.correction or ()
        return (self.correction,)

    @model_validator(mode="before")
    @classmethod
    def over_its_preset(cls, given: Any) -> Any:
        return presets.over_preset(given) if isinstance(given, dict) else given
