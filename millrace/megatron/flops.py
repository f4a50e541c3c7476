"""FLOPs of training a model that the megatron backend builds, by the formula of `SequenceCost.of_model`. Torch-free."""

from millrace.megatron.architectures.shape import LatentAttention, ModelShape
from millrace.sequence_cost import AttentionLayer, SequenceCost


def sequence_cost(shape: ModelShape, adapters: int = 0) -> SequenceCost:
    """Training FLOPs by sequence length. Only the experts that a token is sent to count. `adapters` is the number of
    parameters of adapters."""
    query_dim = shape.head_dim if shape.latent is None else shape.latent.plain_dim + shape.latent.rotary_dim
    value_dim = shape.head_dim if shape.latent is None else shape.latent.value_dim
    layer = AttentionLayer(shape.heads * query_dim, shape.heads * value_dim)
    return SequenceCost.of_model(active_parameters(shape) + adapters, [layer] * shape.layers)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that multiply each token: the output head counts, or a critic's; the embedding does not."""
    attention = _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    outputs = 1 if shape.value_head else shape.vocabulary
    total = outputs * shape.hidden + shape.layers * attention
    for layer in range(shape.layers):
        experts = shape.experts
        if experts is None or not experts.layers[layer]:
            total += 3 * shape.hidden * shape.ffn
            continue
        total += shape.hidden * experts.count
        total += 3 * shape.hidden * (experts.ffn * experts.per_token + (experts.shared_ffn or 0))
    return total


def _attention(shape: ModelShape) -> int:
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.key_value_heads)


def _latent_attention(shape: ModelShape, latent: LatentAttention) -> int:
    query = shape.heads * (latent.plain_dim + latent.rotary_dim)
    queries = shape.hidden * query
    if latent.query_rank is not None:
        queries = latent.query_rank * (shape.hidden + query)
    down = shape.hidden * (latent.key_value_rank + latent.rotary_dim)
    up = latent.key_value_rank * shape.heads * (latent.plain_dim + latent.value_dim)
    return queries + down + up + shape.heads * latent.value_dim * shape.hidden
