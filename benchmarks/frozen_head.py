"""Predictions beside peaks that were measured while the gradient of a frozen head was still computed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from millrace.memory import fsdp2, megatron
from millrace.memory.layers import head_bytes


@contextmanager
def frozen_head_gradient() -> Iterator[None]:
    """Counts the gradient of a frozen head in every prediction of memory made inside: vocabulary · hidden · (4 + bytes
    of an element). BENCHMARKS.md's rows with LoRA hold it; they were not measured since trainers skip it."""

    def with_gradient(vocabulary: float, hidden: int, chunk_tokens: float, element: int, *, frozen: bool) -> float:
        return head_bytes(vocabulary, hidden, chunk_tokens, element, frozen=False)

    with ExitStack() as patches:
        for backend in (fsdp2, megatron):
            patches.enter_context(patch.object(backend, "head_bytes", with_gradient))
        yield
