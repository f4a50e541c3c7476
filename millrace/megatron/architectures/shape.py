"""A model's shape: the part of a Hugging Face config that decides how Megatron builds the model and where its weights
are; and the FLOPs of training it, by the formula of `SequenceCost.of_model`. The other files of this folder read the
shape from `config.json`. Torch-free."""

from dataclasses import dataclass, field, replace
from typing import Literal

from millrace.sequence_cost import AttentionLayer, SequenceCost
from millrace.towers import TowerShape

VOCABULARY_MULTIPLE = 16
"""The vocabulary is padded so that each tensor-parallel rank has a multiple of this many rows, for tensor cores."""


@dataclass(frozen=True)
class Names:
    """Names of the tensors in the model folder. {layer} and {expert} count from 0."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    value_head: str = "score.weight"
    layer: str = "model.layers.{layer}."
    """Prefix of every name below."""
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
    shared_output: str = "mlp.shared_expert_gate.weight"
    """The gate of the output of shared experts, one row."""
    module: str = "model."
    """What stands in the transformers module in place of the `model.` with which names of layers begin."""

    untrained: tuple[str, ...] = ()
    """Patterns of the folder's tensors that are not built. Engines keep theirs, saved models those of the folder."""

    def in_module(self, name: str) -> str:
        """Name in the transformers module of a layer of the folder, or of a tensor of its adapter."""
        return name.replace("model.", self.module, 1)

    def in_folder(self, name: str) -> str:
        """The reverse of `in_module`."""
        return name.replace(self.module, "model.", 1)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `factor` to `mscale_all_dim` are for yarn only."""

    theta: float
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    fraction: float = 1.0
    """Part of the dimensions of a head that get positions: the first ones."""
    sections: tuple[int, ...] = ()
    """How many of a head's frequencies turn by the time, the height and the width of a token, in a model for images."""
    interleaved: bool = False
    """Whether these frequencies take turns. Otherwise those of time are the first ones, and those of width the last."""

    def axes(self) -> list[int]:
        """For each frequency of a head the axis that it turns by: 0 for time, 1 for height, 2 for width."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        return [n % 3 if n < 3 * self.sections[n % 3] else 0 for n in range(sum(self.sections))]


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2412.19437): sizes of its projections."""

    query_rank: int | None
    """Width of the compressed queries; None if queries are not compressed."""
    key_value_rank: int
    plain_dim: int
    """Dimensions of a query or key head without positions."""
    rotary_dim: int
    value_dim: int
    norm_epsilon: float = 1e-6
    """Epsilon of the norms on compressed queries, keys and values; the model's other norms may have another."""


@dataclass(frozen=True)
class Recurrence:
    """Layers of GatedDeltaNet (arXiv 2412.06464), which keep states of one size in place of keys and values."""

    layers: tuple[bool, ...]
    """Whether each layer of the model is one."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int
    """Tokens that the convolution sees."""
    state_bytes: int | None = None
    """Bytes of an element of the state in engines; None: those of the job's dtype."""
    by_key_head: bool = False
    """Whether the folder has one tensor of all projections of a key head after the other (Qwen3-Next), or one tensor
    for each projection (Qwen3.5)."""

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> int:
        """Elements of the state of one layer and sequence."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a mixture-of-experts model."""

    count: int
    per_token: int
    """Experts that each token is sent to."""
    ffn: int
    """Hidden size of one expert."""
    layers: tuple[bool, ...]
    """For each layer whether it has experts."""
    shared_ffn: int | None = None
    """Hidden size of all shared experts together."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied with a gate, one number a token."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the weights of the chosen experts are normalised to sum to 1."""
    bias: bool = False
    """Whether each expert's score has a bias that affects the choice but not the weight."""
    scaling: float | None = None
    """Factor on the weights of the chosen experts."""
    groups: int | None = None
    """Groups of experts; only the experts of `groups_per_token` groups are considered for a token."""
    groups_per_token: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """The sizes and features of a decoder."""

    architecture: str
    """`model_type` of the config."""
    layers: int
    hidden: int
    ffn: int
    """Hidden size of dense layers' feed-forward networks."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    context: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    """Whether the output head is the embedding."""
    attention_bias: bool = False
    """Whether the query, key and value projections have biases."""
    query_key_norm: bool = False
    gated: bool = False
    """Whether a gate of attention's output, as wide as the queries, is projected with them, head by head."""
    centred_norms: bool = False
    """Whether norms multiply with 1 + their weight, except the one inside a recurrence."""
    latent: LatentAttention | None = None
    recurrence: Recurrence | None = None
    experts: ExpertShape | None = None
    value_head: bool = False
    """Whether the output is one value for each token instead of logits: a critic."""
    tower: TowerShape | None = None
    """The tower for images, whose parameters are not among those of the decoder."""
    deepstack_layers: int = 0
    """The first layers, to whose outputs features of images are added (DeepStack, arXiv 2406.04334)."""
    names: Names = field(default_factory=Names)

    def as_critic(self) -> "ModelShape":
        """The same decoder with a value head instead of the output head."""
        return replace(self, tied=False, value_head=True)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def has_recurrence(self, layer: int) -> bool:
        return self.recurrence is not None and self.recurrence.layers[layer]

    @property
    def attending(self) -> int:
        """Number of the layers that attend."""
        return self.layers - (0 if self.recurrence is None else sum(self.recurrence.layers))

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-self.vocabulary // multiple) * multiple


def sequence_cost(shape: ModelShape, adapters: int = 0) -> SequenceCost:
    """Training FLOPs by sequence length. Only the experts that a token is sent to count. `adapters` is the number of
    parameters of adapters."""
    query_dim = shape.head_dim if shape.latent is None else shape.latent.plain_dim + shape.latent.rotary_dim
    value_dim = shape.head_dim if shape.latent is None else shape.latent.value_dim
    layers = [AttentionLayer(shape.heads * query_dim, shape.heads * value_dim)] * shape.attending
    if shape.recurrence is not None:
        layers += [AttentionLayer(0, 0, state=shape.recurrence.state)] * (shape.layers - shape.attending)
    return SequenceCost.of_model(active_parameters(shape) + adapters, layers)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that multiply each token: the output head counts, or a critic's; the embedding does not."""
    attention = _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    outputs = 1 if shape.value_head else shape.vocabulary
    total = outputs * shape.hidden + shape.attending * attention
    if shape.recurrence is not None:
        total += (shape.layers - shape.attending) * _recurrence(shape, shape.recurrence)
    for layer in range(shape.layers):
        experts = shape.experts
        if experts is None or not experts.layers[layer]:
            total += 3 * shape.hidden * shape.ffn
            continue
        total += shape.hidden * experts.count
        total += 3 * shape.hidden * (experts.ffn * experts.per_token + (experts.shared_ffn or 0))
    return total


def _attention(shape: ModelShape) -> int:
    gates = shape.heads if shape.gated else 0
    return shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.key_value_heads + gates)


def _recurrence(shape: ModelShape, recurrence: Recurrence) -> int:
    """Queries, keys, values, the gate of the output, decay and rate of each head; the convolution; and the output."""
    outputs = recurrence.channels + recurrence.value_width + 2 * recurrence.value_heads
    return shape.hidden * (outputs + recurrence.value_width) + recurrence.channels * recurrence.window


def _latent_attention(shape: ModelShape, latent: LatentAttention) -> int:
    query = shape.heads * (latent.plain_dim + latent.rotary_dim)
    queries = shape.hidden * query
    if latent.query_rank is not None:
        queries = latent.query_rank * (shape.hidden + query)
    down = shape.hidden * (latent.key_value_rank + latent.rotary_dim)
    up = latent.key_value_rank * shape.heads * (latent.plain_dim + latent.value_dim)
    return queries + down + up + shape.heads * latent.value_dim * shape.hidden
