"""Memory of the scoring head, the same in both backends: see `services/trainer/backends/head.py`."""

CHUNK_COPIES = 2
"""Copies of a chunk's logits at a time: logits and their gradient, in the dtype of the pass."""


def head_bytes(vocabulary: float, hidden: int, chunk_tokens: float, element: int) -> float:
    """Bytes at the peak of the head's backward pass: the gradient of its weight in float32, one product or copy of it
    in the dtype of the pass, and a chunk of logits. `vocabulary`: rows of the weight on this rank."""
    return vocabulary * hidden * (4 + element) + CHUNK_COPIES * chunk_tokens * vocabulary * element


def scoring_bytes(vocabulary: float, chunk_tokens: float, element: int) -> float:
    """The same without a backward pass."""
    return CHUNK_COPIES * chunk_tokens * vocabulary * element
