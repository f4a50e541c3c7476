"""FLOPs of training a model, by published formulas: 6 for each parameter that multiplies a token, and
6 · layers · heads · head dimension for each pair of tokens that attend to each other. Torch-free."""

from millrace.batching.cost import SequenceCost
from millrace.megatron.architectures.shape import LatentAttention, ModelShape


def sequence_cost(shape: ModelShape) -> SequenceCost:
    """Training FLOPs by sequence length. Only the experts that a token is sent to count."""
    query_dim = shape.head_dim if shape.latent is None else shape.latent.plain_dim + shape.latent.rotary_dim
    value_dim = shape.head_dim if shape.latent is None else shape.latent.value_dim
    pair = 6.0 * shape.layers * shape.heads * (query_dim + value_dim) / 2
    return SequenceCost(6.0 * active_parameters(shape), pair)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that multiply each token: the output head counts once, the embedding does not count."""
    attention = _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    total = shape.vocabulary * shape.hidden + shape.layers * attention
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
