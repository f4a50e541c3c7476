"""Small jobs whose steps can be computed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.simulation.setting import Lengths, MeasuredRate, Setting, TrainerRate


@dataclass(frozen=True)
class ByPrompt:
    """Every answer to a prompt has the length that is written down; a prompt beyond the list has the last one."""

    lengths: Sequence[float]

    def of(self, prompt: int, sample: int, attempt: int) -> float:
        return self.lengths[min(prompt, len(self.lengths) - 1)]


SECOND = MeasuredRate((1,), (1.0,))
"""A token a second, however many requests run."""


def setting(lengths: Lengths | Sequence[float], **changes: Any) -> Setting:
    """One prompt of one answer a step, a second a token, a trainer that takes no time."""
    found = ByPrompt(lengths) if isinstance(lengths, Sequence) else lengths
    plain = Setting(prompts=1, samples=1, lengths=found, engine=SECOND, trainer=TrainerRate())
    return replace(plain, **changes)
