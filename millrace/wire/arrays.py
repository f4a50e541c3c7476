"""Arrays on the wire: little-endian bytes, no copy where the host is little-endian."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Token ids, int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> NDArray[np.int32]:
    """Token ids, int32 [tokens], read-only."""
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Log-probabilities in nats, float32."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> NDArray[np.float32]:
    """Log-probabilities in nats, float32 [tokens], read-only."""
    return np.frombuffer(data, dtype="<f4")
