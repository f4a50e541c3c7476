"""Where the tensors of a model folder are in a checkpoint that has them under other names and in other pieces."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A box of a tensor of the model that is a box of a stored tensor."""

    key: str
    """The stored tensor."""
    offset: tuple[int, ...]
    """First index of the box in the model's tensor."""
    extent: tuple[int, ...]
    """Size of the box, in the dimensions of the model's tensor."""
    stored: tuple[int, ...]
    """First index of the box in the stored tensor."""
    along: tuple[int | None, ...]
    """For each dimension of the stored tensor, the dimension of the model's tensor that runs along it; None where the
    box has one element there."""


@dataclass(frozen=True)
class Located:
    """A tensor of the model."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype in which it is stored."""
    parts: tuple[Part, ...]
