"""Sizes of a decoder's layers: parameters, and what autograd keeps of each token. Counted in elements, not bytes."""

from dataclasses import dataclass

from millrace.megatron.architectures.shape import ModelShape
from millrace.spec import JobSpec
from millrace.spec.trainer import Role, Trainer
from millrace.towers import TowerShape

Matrix = tuple[int, int]
"""Inputs and outputs of a linear layer."""


def linear_layers(shape: ModelShape, layer: int) -> dict[str, Matrix]:
    """The linear layers of one decoder layer by their names in Hugging Face's models; routed experts are not among
    them. Of a recurrent layer by the names of Qwen3.5: Qwen3-Next stores the same in fewer tensors."""
    hidden, latent, recurrence = shape.hidden, shape.latent, shape.recurrence
    if recurrence is not None and shape.has_recurrence(layer):
        found = {
            "in_proj_qkv": (hidden, recurrence.channels),
            "in_proj_z": (hidden, recurrence.value_width),
            "in_proj_b": (hidden, recurrence.value_heads),
            "in_proj_a": (hidden, recurrence.value_heads),
            "out_proj": (recurrence.value_width, hidden),
        }
    elif latent is None:
        query, key = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
        found = {
            "q_proj": (hidden, 2 * query if shape.gated else query),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
        }
    else:
        query = shape.heads * (latent.plain_dim + latent.rotary_dim)
        value = shape.heads * latent.value_dim
        found = {
            "kv_a_proj_with_mqa": (hidden, latent.key_value_rank + latent.rotary_dim),
            "kv_b_proj": (latent.key_value_rank, shape.heads * latent.plain_dim + value),
            "o_proj": (value, hidden),
        }
        if latent.query_rank is None:
            found["q_proj"] = (hidden, query)
        else:
            found |= {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, query)}
    ffn = _dense_ffn(shape, layer)
    if ffn:
        found |= {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
    return found


def _dense_ffn(shape: ModelShape, layer: int) -> int:
    """Width of the feed-forward network that every token passes: the layer's own, or that of shared experts."""
    if shape.experts is None or not shape.has_experts(layer):
        return shape.ffn
    return shape.experts.shared_ffn or 0


@dataclass(frozen=True)
class LayerParameters:
    """Number of parameters of one decoder layer."""

    dense: float
    """All but the routed experts."""
    experts: float
    """All routed experts together."""

    @property
    def total(self) -> float:
        return self.dense + self.experts


def layer_parameters(shape: ModelShape, layer: int) -> LayerParameters:
    dense = sum(inputs * outputs for inputs, outputs in linear_layers(shape, layer).values()) + 2 * shape.hidden
    if shape.recurrence is not None and shape.has_recurrence(layer):
        of = shape.recurrence  # the convolution, a decay and a bias of each head, and the norm of a head's output
        dense += of.channels * of.window + 2 * of.value_heads + of.value_dim
    experts = shape.experts
    if experts is None or not shape.has_experts(layer):
        return LayerParameters(dense, 0)
    return LayerParameters(dense + shape.hidden * experts.count, 3 * shape.hidden * experts.ffn * experts.count)


def head_parameters(shape: ModelShape) -> int:
    """Parameters of the output head, or of a critic's."""
    return (1 if shape.value_head else shape.vocabulary) * shape.hidden


def vocabulary_parameters(shape: ModelShape) -> int:
    """Parameters of embedding and output head; a tied head is counted once."""
    return shape.vocabulary * shape.hidden + (0 if shape.tied else head_parameters(shape))


def parameters(shape: ModelShape, *, with_tower: bool = False) -> float:
    """Number of parameters of the whole model; `with_tower`: with its tower for images, if it has one."""
    tower = shape.tower.parameters if with_tower and shape.tower is not None else 0
    layers = sum(layer_parameters(shape, layer).total for layer in range(shape.layers))
    return vocabulary_parameters(shape) + layers + tower


@dataclass(frozen=True)
class KeptElements:
    """Elements that autograd keeps of one token in one layer."""

    residual: float
    """The layer's input, the residual between its halves, and the outputs of both norms."""
    attention: float
    """Projections, queries and keys after their norms and positions, values, and the output."""
    ffn: float
    """Gate, up and their product, of the dense network or of the shared experts."""
    sent: float
    """Inputs of the routed experts, once for each expert that the token is sent to."""
    experts: float
    """Gate, up and their product inside these experts."""

    @property
    def total(self) -> float:
        return self.residual + self.attention + self.ffn + self.sent + self.experts


def kept_elements(shape: ModelShape, layer: int) -> KeptElements:
    ffn, experts = 3 * _dense_ffn(shape, layer), shape.experts
    if experts is None or not shape.has_experts(layer):
        return KeptElements(4 * shape.hidden, _attention(shape, layer), ffn, 0, 0)
    times = experts.per_token
    sent, inside = times * shape.hidden, 3 * times * experts.ffn
    return KeptElements(4 * shape.hidden, _attention(shape, layer), ffn, sent, inside)


CHUNK = 64
"""Tokens of a chunk of a recurrence: its kernel keeps that many elements of a token and head, for the backward pass."""


def _attention(shape: ModelShape, layer: int) -> float:
    """Queries three times (projected, with positions, and the output in their place), keys and values three times; a
    gate, and the output that it was multiplied with. Of a recurrent layer with flash-linear-attention: what goes into
    the convolution and what comes out, queries and keys for each value head, gate, decay and rate, the output before
    and after its norm, and what the kernel keeps."""
    if shape.recurrence is not None and shape.has_recurrence(layer):
        of = shape.recurrence
        return 2 * of.channels + 3 * of.value_width + of.value_heads * (2 * of.key_dim + CHUNK + 4)
    if shape.latent is None:
        query = shape.heads * shape.head_dim
        return 3 * query + 3 * shape.key_value_heads * shape.head_dim + (2 * query if shape.gated else 0)
    latent = shape.latent
    query = shape.heads * (latent.plain_dim + latent.rotary_dim)
    value = shape.heads * latent.value_dim
    compressed = 2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rotary_dim
    return compressed + 4 * query + 2 * value


CHUNK_COPIES = 2
"""Copies of a chunk's logits at a time: logits and their gradient, in the dtype of the pass."""


def head_bytes(vocabulary: float, hidden: int, chunk_tokens: float, element: int, *, frozen: bool) -> float:
    """Bytes at the peak of the head's backward pass: a chunk of logits, and unless the weight is frozen its gradient
    in float32 and one product or copy of it in the dtype of the pass. `vocabulary`: rows of the weight on this rank."""
    gradient = 0 if frozen else vocabulary * hidden * (4 + element)
    return gradient + scoring_bytes(vocabulary, chunk_tokens, element)


def scoring_bytes(vocabulary: float, chunk_tokens: float, element: int) -> float:
    """A chunk of logits: all that a pass without gradients takes."""
    return CHUNK_COPIES * chunk_tokens * vocabulary * element


def seeing_bytes(spec: JobSpec, tower: TowerShape, element: int) -> float:
    """Most bytes of the tower's forward pass for the largest image that a prompt may have."""
    patches = min(tower.most_patches, spec.data.max_prompt_tokens * tower.merge**2)
    return tower.working_bytes(patches, element)


def role_tokens(trainer: Trainer, role: Role, tokens: int) -> int:
    """Tokens of a micro-batch of reference or critic if one of the policy has `tokens`: more or fewer in proportion
    to the token budgets."""
    return -(-tokens * trainer.of(role).token_budget // trainer.token_budget)
