"""Arrays on the wire: little-endian bytes, no copy where the host is little-endian."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.wire.v1 import common_pb2

NONE_TOLD = -1
"""In the place of an expert, of a token of which the engine told nothing."""


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


def pack_experts(chosen_tlk: NDArray[np.integer]) -> common_pb2.Experts:
    """Choices of the first T tokens, [T, layers, experts a token]."""
    _, layers, per_token = chosen_tlk.shape
    wide = bool(chosen_tlk.max(initial=0) > 255)
    chosen = np.ascontiguousarray(chosen_tlk, dtype="<u2" if wide else "u1").tobytes()
    return common_pb2.Experts(chosen=chosen, layers=layers, per_token=per_token, wide=wide)


def unpack_experts(experts: common_pb2.Experts, tokens: int) -> NDArray[np.int16]:
    """int16 [tokens, layers, experts a token]; NONE_TOLD for those at the end that were not told. Raises ValueError
    where these are not choices of at most so many tokens."""
    shape = (-1, experts.layers, experts.per_token)
    told = np.frombuffer(experts.chosen, dtype="<u2" if experts.wide else "u1").reshape(shape)
    if len(told) > tokens:
        raise ValueError(f"experts of {len(told)} tokens were told, of {tokens}")
    whole = np.full((tokens, *told.shape[1:]), NONE_TOLD, np.int16)
    whole[: len(told)] = told
    return whole
