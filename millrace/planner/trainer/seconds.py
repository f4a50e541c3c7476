"""Seconds by what they are spent on."""

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Cause(StrEnum):
    """What a trainer's seconds are spent on."""

    PRODUCTS = "products"
    """Matrix products of the layers."""
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    """Reading and writing activations."""
    LAUNCHES = "launches"
    """Starting the products of experts, one by one."""
    HEAD = "head"
    """The output head: products and logits."""
    TENSOR = "tensor"
    """Exchange between tensor- or context-parallel ranks."""
    EXPERTS = "experts"
    """Exchange of tokens between expert-parallel ranks."""
    PIPELINE = "pipeline"
    """Waiting for other pipeline stages."""
    PACKING = "packing"
    """Waiting for ranks with fuller micro-batches."""
    DATA = "data"
    """Gathering weights and adding gradients over data-parallel ranks."""
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    """Moving weights, optimizer and activations between GPU and host memory."""


Seconds = Mapping[Cause, float]


def added(parts: Iterable[Seconds]) -> dict[Cause, float]:
    """The sum, cause by cause."""
    found: dict[Cause, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def scaled(seconds: Seconds, factor: float) -> dict[Cause, float]:
    return {cause: factor * value for cause, value in seconds.items()}


def total(seconds: Seconds) -> float:
    return sum(seconds.values())
