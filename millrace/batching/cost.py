"""The cost of a sequence: matrix products grow with its length, attention with the square of its length."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a sequence of s tokens: per_token · s + per_token_pair · s². For planning only the ratio matters."""

    per_token: float = 1.0
    per_token_pair: float = 0.0

    def __post_init__(self) -> None:
        if self.per_token < 0 or self.per_token_pair < 0 or self.per_token + self.per_token_pair == 0:
            raise ValueError(f"{self} gives no positive cost: neither part may be negative, nor both zero.")

    @classmethod
    def of_model(cls, *, matmul_parameters: float, layers: int, heads: int, head_dim: int) -> Self:
        """Training FLOPs of a causal transformer: 6 · parameters a token, 6 · layers · heads · head_dim a token pair.

        `matmul_parameters` are those that multiply each token: attention, MLP or active experts, the output head.
        """
        return cls(6.0 * matmul_parameters, 6.0 * layers * heads * head_dim)

    def of(self, length: int) -> float:
        """Cost of a sequence of `length` tokens."""
        return self.per_token * length + self.per_token_pair * length * length

    def total(self, lengths: Iterable[int]) -> float:
        """Cost of the sequences of one micro-batch, which do not attend to each other."""
        return sum(map(self.of, lengths))
