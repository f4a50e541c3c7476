"""What a job's reward is computed with: a function, its options, and how it is called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Scope = Literal["answer", "group"]
"""What one call of a function scores: one answer, or all answers to a prompt."""


@dataclass(frozen=True)
class Term:
    """One function of a reward."""

    function: str
    """Its name: built-in, `module:function` or `file.py:function`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call."""
    scope: Scope = "answer"
    weight: float = 1.0
    """Factor of its score in the reward."""
    name: str = ""
    """Name of its score beside the reward; empty if it is the only function and its score is the reward."""
    field: str = "reward"
    """Path of the mapping in the job spec that names it."""


@dataclass(frozen=True)
class PoolTerm:
    """A part of a reward that the replicas of a pool score."""

    pool: str
    """Name of the pool."""
    name: str
    """Name of its score beside the reward."""
    weight: float = 1.0
    """Factor of its score in the reward."""
