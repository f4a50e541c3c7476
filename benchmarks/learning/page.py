"""The figure, and the part of a page that shows it with its table."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.learning.jobs import Comparison
from benchmarks.learning.results import LAST, Result


def write(page: Path, comparison: Comparison, results: Sequence[Result], margin: float) -> None:
    """Puts the figure beside `page`, into docs/, and the section into it, in the place of the one that was there."""
    figure = page.parent / "docs" / comparison.figure
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw(figure, results)
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Benchmarks\n"
    begin = f"<!-- {comparison.name}: written by `{comparison.command}` -->"
    end = f"<!-- end of {comparison.name} -->"
    section = f"{begin}\n{_section(comparison, results, figure.relative_to(page.parent), margin)}\n{end}"
    if begin in text:
        before, rest = text.split(begin, 1)
        text = f"{before}{section}{rest.split(end, 1)[1]}"
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    page.write_text(text, encoding="utf-8")


def draw(path: Path, results: Sequence[Result]) -> None:
    """Held-out reward by step: a line for each variant, the mean over its seeds, in a band from worst to best."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "millrace"  # the same results give the same file
    from matplotlib import pyplot

    groups = grouped(results)
    columns = 3 if len(groups) == 6 else min(4, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(2.8 * columns, 2.4 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis, (variant, runs) in zip(axes.flat, groups.items(), strict=False):
        steps = sorted(set.intersection(*(set(run.held_out) for run in runs)))
        values = [[run.held_out[step] for run in runs] for step in steps]
        axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.25, linewidth=0)
        axis.plot(steps, [fmean(v) for v in values])
        axis.set_title(variant, fontsize=10)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("held-out reward", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results by variant, in the order in which they come."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.variant, []).append(result)
    return groups


def _section(comparison: Comparison, results: Sequence[Result], figure: Path, margin: float) -> str:
    groups, first = grouped(results), results[0]
    machines = "; ".join(dict.fromkeys(result.machine for result in results))
    lines = [
        f"## {comparison.heading}",
        "",
        comparison.words.format(steps=first.steps, margin=margin),
        f"`{comparison.command}`; {machines}.",
        "",
        f"![held-out reward by step]({figure.as_posix()})",
        "",
        f"| {comparison.column} | seeds | held-out before | after | training, last {LAST} steps "
        "| learnt | seconds a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, runs in groups.items():
        after = ", ".join(f"{run.after:.2f}" for run in runs)
        learnt = sum(run.after - run.before >= margin for run in runs)
        cells = (
            variant,
            ", ".join(str(run.seed) for run in runs),
            f"{fmean(run.before for run in runs):.3f}",
            f"{fmean(run.after for run in runs):.3f} ({after})",
            f"{fmean(run.training_last for run in runs):.3f}",
            f"{learnt} of {len(runs)}",
            f"{fmean(run.seconds / max(1, len(run.training) - 1) for run in runs):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
