"""docs/algorithms.md has a row for everything that a job may name, with its real options and defaults."""

import re
from pathlib import Path

import pytest

from millrace.rl.registry.catalogue import AGGREGATIONS, KL_ESTIMATORS, AlgorithmKind, find, names

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
HEADINGS = {
    AlgorithmKind.ADVANTAGE: "## Advantages",
    AlgorithmKind.POLICY_LOSS: "## Policy losses",
    AlgorithmKind.CORRECTION: "## Corrections",
    AlgorithmKind.DISTILLATION: "## Distillation",
}


def rows(heading: str) -> dict[str, list[str]]:
    """Of a section's table, each row's cells by the name in its first."""
    section = PAGE.split(f"\n{heading}", 1)[1].split("\n## ", 1)[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row] for row in cells}


def written(default: object) -> str:
    match default:
        case None:
            return "none"
        case bool():
            return str(default).lower()
        case str():
            return f'"{default}"'
        case tuple():
            return str(list(default))
        case float() if 0 < default < 1e-4:
            return f"{default:.0e}".replace("e-0", "e-")
        case float():
            return f"{default:.4f}".rstrip("0") if 0 < default < 1e-3 else str(default)
    return str(default)


@pytest.mark.parametrize("kind", AlgorithmKind)
def test_every_algorithm_has_its_row(kind):
    table = rows(HEADINGS[kind])
    assert set(table) == set(names(kind))
    for name, row in table.items():
        entry = find(kind, name)
        _, _, papers, options, _ = row
        assert set(re.findall(r"\d{4}\.\d{4,5}", papers)) <= set(entry.arxiv)
        assert bool(papers) == bool(entry.arxiv)
        given = re.findall(r"`(\w+)` (\[.*?\]|\S+?)(?=[,\s]|$)", options)
        assert given == [(option.name, written(option.default)) for option in entry.options], name


def test_every_aggregation_and_estimator_has_its_row():
    assert tuple(rows("## Aggregation")) == AGGREGATIONS
    assert tuple(rows("## KL to the reference")) == KL_ESTIMATORS
