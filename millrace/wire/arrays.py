"""Arrays on the wire: little-endian bytes, no copy if the host is little-endian."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from millrace.contracts.v1 import common_pb2

NOT_REPORTED = -1
"""Stands for an expert of a token for which the engine reported no routing."""


def pack_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Token ids as int32, little-endian."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> NDArray[np.int32]:
    """Token ids, int32 [tokens], read-only."""
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Numbers as float32, little-endian."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> NDArray[np.float32]:
    """Numbers, float32, read-only."""
    return np.frombuffer(data, dtype="<f4")


def pack_logprobs(logprobs: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Log-probabilities in nats as float32, little-endian."""
    return pack_floats(logprobs)


def unpack_logprobs(data: bytes) -> NDArray[np.float32]:
    """Log-probabilities in nats, float32 [tokens], read-only."""
    return unpack_floats(data)


def pack_experts(chosen_tlk: NDArray[np.integer]) -> common_pb2.Experts:
    """Experts chosen for the first T tokens, [T, layers, experts per token]."""
    _, layers, per_token = chosen_tlk.shape
    wide = bool(chosen_tlk.max(initial=0) > 255)
    chosen = np.ascontiguousarray(chosen_tlk, dtype="<u2" if wide else "u1").tobytes()
    return common_pb2.Experts(chosen=chosen, layers=layers, per_token=per_token, wide=wide)


def reported_experts(experts: common_pb2.Experts) -> NDArray[np.integer]:
    """[tokens, layers, experts per token], as `pack_experts` took them, read-only. Raises ValueError."""
    shape = (-1, experts.layers, experts.per_token)
    return np.frombuffer(experts.chosen, dtype="<u2" if experts.wide else "u1").reshape(shape)


def unpack_experts(experts: common_pb2.Experts, tokens: int) -> NDArray[np.int16]:
    """int16 [tokens, layers, experts per token]; NOT_REPORTED for tokens at the end that the engine did not report.
    Raises ValueError if `experts` are of more than `tokens` tokens."""
    reported = reported_experts(experts)
    if len(reported) > tokens:
        raise ValueError(f"the engine reported experts of {len(reported)} tokens, of {tokens}")
    whole = np.full((tokens, *reported.shape[1:]), NOT_REPORTED, np.int16)
    whole[: len(reported)] = reported
    return whole


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of N tokens, and of the K most likely tokens in the place of each."""

    logprobs_n: NDArray[np.float32]
    """[N], nats."""
    top_tokens_nk: NDArray[np.int32]
    """[N, K], the most likely token first; K is 0 if none were asked for."""
    top_logprobs_nk: NDArray[np.float32]
    """[N, K], nats."""

    def message(self) -> common_pb2.TokenScores:
        return common_pb2.TokenScores(
            logprobs=pack_logprobs(self.logprobs_n),
            top_tokens=pack_tokens(self.top_tokens_nk),
            top_logprobs=pack_logprobs(self.top_logprobs_nk),
        )

    @classmethod
    def of(cls, message: common_pb2.TokenScores, tokens: int, top: int) -> Self:
        """The scores of `tokens` tokens with `top` others each. Raises ValueError if the message has other sizes, or
        a score that is NaN or infinite."""
        logprobs_n = unpack_logprobs(message.logprobs)
        top_tokens, top_logprobs = unpack_tokens(message.top_tokens), unpack_logprobs(message.top_logprobs)
        if (len(logprobs_n), len(top_tokens), len(top_logprobs)) != (tokens, tokens * top, tokens * top):
            raise ValueError(f"{len(logprobs_n)} scores, {len(top_tokens)} others, of {tokens} tokens with {top} each")
        if not (np.isfinite(logprobs_n).all() and np.isfinite(top_logprobs).all()):
            raise ValueError("a log-probability is not finite")
        return cls(logprobs_n, top_tokens.reshape(tokens, top), top_logprobs.reshape(tokens, top))
