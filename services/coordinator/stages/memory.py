"""The memory of the trainer in a job's report: what was predicted and what was measured, phase by phase."""

from collections.abc import Iterator, Mapping, Sequence

from millrace.memory.ledger import Part, Phase
from millrace.rest import StepMetrics
from millrace.telemetry.metrics.catalogue import find
from millrace.telemetry.metrics.step.memory import MEMORY, OFFLOADED, PEAK, PREDICTED, REST

ROWS = (*Part, REST, PEAK, OFFLOADED)
MemoryByPhase = Mapping[str, Mapping[str, Mapping[str, float]]]
"""GiB by phase, part, and `predicted` or `measured`."""


def memory_by_phase(rows: Sequence[StepMetrics]) -> MemoryByPhase:
    """The largest value of any step, on the rank that has most. Phases are in the order of a step."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        for name, value in row.values.items():
            if find(name) in MEMORY:
                phase, *kind, part = name.split("/")[1:]
                sizes = found.setdefault(phase, {}).setdefault(part, {})
                column = PREDICTED if kind else "measured"
                sizes[column] = max(sizes.get(column, 0.0), value)
    return {
        phase: {part: found[phase][part] for part in ROWS if part in found[phase]} for phase in Phase if phase in found
    }


def memory_lines(memory: MemoryByPhase) -> Iterator[str]:
    """A table in Markdown, in GiB."""
    if not memory:
        return
    yield from ("", "## Memory of the trainer's fullest rank, GiB", "")
    yield f"| predicted → measured | {' | '.join(memory)} |"
    yield f"|---{'|---' * len(memory)}|"
    for part in ROWS:
        if any(part in parts for parts in memory.values()):
            yield f"| {part} | {' | '.join(_cell(parts.get(part)) for parts in memory.values())} |"
    yield ""
    yield "`rest` is the peak without the parts above that are kept; what is predicted only is measured as part of it."


def _cell(sizes: Mapping[str, float] | None) -> str:
    if sizes is None:
        return "–"
    return " → ".join(f"{sizes[column]:.4g}" if column in sizes else "–" for column in (PREDICTED, "measured"))
