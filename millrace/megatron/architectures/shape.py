"""A model's shape: what of a Hugging Face config decides how Megatron builds it and how its weights are laid out.

`architectures/` reads it from `config.json`, one file an architecture. Torch-free.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

VOCABULARY_MULTIPLE = 16
"""Rows of the vocabulary on each tensor-parallel rank come in multiples of this, as tensor cores like them."""


@dataclass(frozen=True)
class Names:
    """What the tensors are called in the model folder. {layer} and {expert} count from 0."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    value_head: str = "score.weight"
    layer: str = "model.layers.{layer}."
    """Before every name below."""
    gate: str = "mlp.gate_proj.weight"
    up: str = "mlp.up_proj.weight"
    down: str = "mlp.down_proj.weight"
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    expert_gate: str = "mlp.experts.{expert}.gate_proj.weight"
    expert_up: str = "mlp.experts.{expert}.up_proj.weight"
    expert_down: str = "mlp.experts.{expert}.down_proj.weight"
    shared_gate: str = "mlp.shared_experts.gate_proj.weight"
    shared_up: str = "mlp.shared_experts.up_proj.weight"
    shared_down: str = "mlp.shared_experts.down_proj.weight"


@dataclass(frozen=True)
class Rope:
    """Rotary positions; all but theta only for yarn."""

    theta: float
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2412.19437): sizes of its projections."""

    query_rank: int | None
    """None: queries are projected at once."""
    key_value_rank: int
    plain_dim: int
    """Size of the part of a query or key head without positions."""
    rotary_dim: int
    value_dim: int
    norm_epsilon: float = 1e-6
    """Epsilon of the norms on the compressed queries, keys and values, whatever the model's other norms have."""


@dataclass(frozen=True)
class ExpertShape:
    count: int
    per_token: int
    ffn: int
    layers: tuple[bool, ...]
    """Which of the model's layers have experts."""
    shared_ffn: int | None = None
    """Hidden size of all shared experts together."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the chosen experts' weights are made to sum to one."""
    bias: bool = False
    """A bias on each expert's score that decides the choice but not the weight."""
    scaling: float | None = None
    groups: int | None = None
    groups_per_token: int | None = None


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    """`model_type` of the config."""
    layers: int
    hidden: int
    ffn: int
    """Width of the dense layers."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    context: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    """The output head is the embedding."""
    attention_bias: bool = False
    """On the query, key and value projections."""
    query_key_norm: bool = False
    latent: LatentAttention | None = None
    experts: ExpertShape | None = None
    value_head: bool = False
    """One number a token in place of the logits: a critic."""
    names: Names = field(default_factory=Names)

    def as_critic(self) -> "ModelShape":
        """The same decoder with a value head."""
        return replace(self, tied=False, value_head=True)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-self.vocabulary // multiple) * multiple
