"""How the model is trained."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from millrace.backends import BACKEND_NAMES, FIELD
from millrace.spec.document import merged
from millrace.validation import limits
from millrace.validation.fields import OneOf, StrictModel

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(StrictModel):
    lr: float = Field(1e-6, ge=0.0, le=1.0)
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), examples=[[0.9, 0.95]])
    """AdamW's betas."""
    eps: float = Field(1e-8, ge=1e-20, le=1.0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.01, ge=0.0, le=limits.LARGEST_WEIGHT)
    """AdamW's weight decay."""
    warmup_steps: int = Field(0, ge=0, le=limits.MOST_STEPS)
    """Steps over which the learning rate rises to `lr`."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up; cosine and linear fall to `min_lr` at the job's last step."""
    min_lr: float = Field(0.0, ge=0.0, le=1.0)
    """Learning rate at the end of `schedule`."""
    clip_grad_norm: float = Field(1.0, ge=limits.SMALLEST_POSITIVE, le=limits.LARGEST_NUMBER)
    """Largest norm of the gradient. A gradient with a larger norm is scaled down to it."""


class ReferenceRun(StrictModel):
    """How the reference policy is run if that differs from the policy."""

    token_budget: int | None = Field(None, ge=16, le=10 * limits.MOST_TOKENS)
    """Tokens in one of its micro-batches on one rank; null: `trainer.token_budget`. A pass without gradients has memory
    for more."""
    backend_options: dict[str, Any] = Field(default_factory=dict, examples=[{"offload_parameters": True}])
    """Options of the backend that have another value for it; null: the backend's default. The others are those of
    `trainer.backend_options`."""


class CriticRun(StrictModel):
    """How the critic is run if that differs from the policy."""

    token_budget: int | None = Field(None, ge=16, le=10 * limits.MOST_TOKENS)
    """Tokens in one of its micro-batches on one rank. It has no logits, so it may be larger. null:
    `trainer.token_budget`."""
    activation_recompute: bool | None = None
    """The same as `trainer.activation_recompute`; null: its value."""
    backend_options: dict[str, Any] = Field(default_factory=dict, examples=[{"offload_activations": True}])
    """Options of the backend that have another value for it; null: the backend's default. The others are those of
    `trainer.backend_options`."""


Role = Literal["reference", "critic"]
ROLES: tuple[Role, ...] = ("reference", "critic")


class Trainer(StrictModel):
    backend: Annotated[str, OneOf(BACKEND_NAMES)] = "fsdp2"
    """Training backend. megatron: docs/megatron.md."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of forward and backward passes. The master weights and the optimizer are float32."""
    token_budget: int = Field(16384, ge=16, le=10 * limits.MOST_TOKENS)
    """Tokens in one micro-batch: prompts and responses, packed. One rank runs it, or the ranks that share it
    (`sequence_parallel_size`, Megatron's `context_parallel`)."""
    on_out_of_memory: Literal["fail", "halve_budget"] = "fail"
    """What happens if a rank of the trainer has no memory left for a micro-batch. fail: the job fails, and says what
    held the memory. halve_budget: the step is made again with half the token budget, which stays halved for the job;
    with one rank at once, with several after the trainer has loaded the last checkpoint. A step with a longer sequence
    has a budget of that sequence's length."""
    updates_per_step: int = Field(1, ge=1, le=limits.MOST_IN_FLIGHT)
    """Optimizer updates in a step, each on its share of the groups."""
    streaming: Literal["auto"] | bool = "auto"
    """Whether the trainer begins with groups of a step while the others are still generated. It adds up their gradient,
    and the optimizer steps when all are there: the step is the same but for rounding. auto: with `max_staleness: 0`,
    unless something in the job needs the whole batch first (docs/algorithms.md); `millrace show` has the reason. true:
    with any `max_staleness`; a job that needs the whole batch is refused. false: the trainer gets all groups of a step
    at once."""
    activation_recompute: bool = False
    """Whether activations are recomputed in the backward pass: less memory, about a third more work."""
    train_tower: bool = False
    """Whether the model's tower for images is trained with its language model, in a job with `data.images`. false: it
    is frozen."""
    optimizer: Optimizer = Field(Optimizer(), examples=[{"lr": 1e-6}])
    """Optimizer of the policy."""
    seed: int = Field(0, ge=0, le=limits.LARGEST_SEED)
    """Seed of everything that a step draws at random."""
    backend_options: dict[str, Any] = Field(default_factory=dict, examples=[{"offload_parameters": True}])
    """Options of the backend, which checks them."""
    reference: ReferenceRun = Field(ReferenceRun(), examples=[{"token_budget": 32768}])
    """How the reference policy of `algorithm.kl` is run."""
    critic: CriticRun = Field(CriticRun(), examples=[{"token_budget": 32768}])
    """How the model of `algorithm.critic` is run."""

    def of(self, role: Role) -> Self:
        """This section as it holds for a role: with the role's own values in place of the policy's."""
        own: ReferenceRun | CriticRun = getattr(self, role)
        values = own.model_dump(include={"token_budget", "activation_recompute"}, exclude_none=True)
        options = merged(self.backend_options, own.backend_options, f"{FIELD}.")
        return self.model_copy(update={**values, "backend_options": options})

    def lowered_to(self, token_budget: int) -> Self:
        """This section with a smaller token budget. The roles' own budgets fall in the same proportion, but not below
        it: every sequence that fits into it fits into theirs."""
        share = token_budget / self.token_budget
        lowered: dict[str, ReferenceRun | CriticRun] = {}
        for role in ROLES:
            own: ReferenceRun | CriticRun = getattr(self, role)
            if own.token_budget is not None:
                budget = min(own.token_budget, max(token_budget, int(share * own.token_budget)))
                lowered[role] = own.model_copy(update={"token_budget": budget})
        return self.model_copy(update={"token_budget": token_budget, **lowered})
