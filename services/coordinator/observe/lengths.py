"""Lengths of the answers that a step was trained on, and of those that it was not: what a job favours shows in them."""

from collections.abc import Sequence
from enum import StrEnum

from services.coordinator.state.group import GroupSummary


class Fate(StrEnum):
    """What becomes of a complete group when a step looks at it."""

    KEPT = "kept"
    """It can be trained, in this step or in a later one."""
    TOO_STALE = "too_stale"
    WITHOUT_SIGNAL = "without_signal"


class Lengths:
    """The complete groups that the step in progress has looked at. One that is left over is looked at by each step."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, float], tuple[Fate, GroupSummary]] = {}

    def add(self, group: GroupSummary, fate: Fate) -> None:
        """The step in progress has looked at a group. Looking again changes nothing."""
        self._seen[group.prompt_id, group.completed_s] = fate, group

    def metrics(self, trained: Sequence[GroupSummary]) -> dict[str, float]:
        """Means over the answers. The next step begins."""
        seen, self._seen = list(self._seen.values()), {}
        stale = [group for fate, group in seen if fate is Fate.TOO_STALE]
        spans = [(span, n) for g in trained for span, n in zip(g.spans, g.response_tokens, strict=True)]
        found = {
            "offered": [float(n) for _, g in seen for n in g.response_tokens],
            "too_stale": [float(n) for g in stale for n in g.response_tokens],
            "without_signal": [float(n) for f, g in seen if f is Fate.WITHOUT_SIGNAL for n in g.response_tokens],
            "carried": [float(n) for span, n in spans if span],
        }
        means = {f"response_length/{name}_mean": sum(of) / len(of) for name, of in found.items() if of}
        return {
            **means,
            "training/too_stale_groups": float(len(stale)),
            "fully_async/partial/total_partial_num": float(len(found["carried"])),
            "fully_async/partial/partial_ratio": len(found["carried"]) / max(len(spans), 1),
            "fully_async/partial/max_partial_span": float(max((span for span, _ in spans), default=0)),
        }
