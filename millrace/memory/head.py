"""Memory of the scoring head, the same in both backends: see `services/trainer/backends/head.py`."""

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
