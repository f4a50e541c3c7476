"""What people read: a line for each fault, and the seconds of each kind of fault over all trials."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.chaos.observation import MILESTONES
from benchmarks.chaos.trial import Outcome, Struck

HEADER = f"{'fault':<9}{'target':<20}{'instant':>9}{'stopped':>9}{'recovery':>10}  verdict"


def line(struck: Struck) -> str:
    fault = struck.fault
    stopped = f"{fault.stopped_s:.1f} s" if fault.stopped_s else ""
    recovery = "never" if struck.recovery_s is None else f"{struck.recovery_s:.2f} s"
    verdict = "held" if struck.recovery_s is not None and not struck.found else "FAILED"
    return f"{fault.act:<9}{fault.target:<20}{struck.at_s:>7.1f} s{stopped:>9}{recovery:>10}  {verdict}"


def summary(outcome: Outcome) -> str:
    verdict = "everything held" if outcome.sound else "FAILED"
    faults = f"{len(outcome.struck)} faults, {outcome.steps} steps, {outcome.seconds:.0f} s"
    return f"seed {outcome.seed}: {verdict}; {faults}, max_staleness {outcome.max_staleness}"


def failure(outcome: Outcome, command: str) -> str:
    """Everything that is needed to repeat and to understand it."""
    found = [f"  {problem}" for problem in outcome.found]
    for struck in outcome.struck:
        where = f"  after {struck.fault.act} of {struck.fault.target} (pid {struck.pid}) at {struck.at_s:.1f} s:"
        found += [f"{where} {problem}" for problem in struck.found]
        found += [f"{where} no step was completed any more"] if struck.recovery_s is None else []
    logs = outcome.folder / "state" / "logs"
    return "\n".join([*found, f"  repeat: {command}", f"  logs: {logs}, its state and its job beside it"])


def by_kind(struck: Iterable[Struck]) -> str:
    """A Markdown table: seconds until the next step, by fault and target."""
    kinds: dict[tuple[str, str], list[Struck]] = {}
    for one in struck:
        kinds.setdefault((one.fault.target, one.fault.act), []).append(one)
    rows = ["| target | fault | times | median | slowest | on the way, median |", "|---|---|---|---|---|---|"]
    for (target, act), faults in sorted(kinds.items()):
        seconds = [math.inf if one.recovery_s is None else one.recovery_s for one in faults]
        figures = f"{len(seconds)} | {median(seconds):.1f} s | {max(seconds):.1f} s | {_milestones(faults)}"
        rows.append(f"| {target} | {act} | {figures} |")
    return "\n".join(rows)


def _milestones(faults: Sequence[Struck]) -> str:
    """Each event that came on the way to the next step in at least half of the faults."""
    medians = []
    for kind in MILESTONES:
        seconds = [one.milestones[kind] for one in faults if kind in one.milestones]
        if 2 * len(seconds) >= len(faults):
            medians.append(f"{kind} {median(seconds):.1f}")
    return ", ".join(medians)


def repeating(seed: int, options: Sequence[str], state: Path) -> str:
    return " ".join(["python -m benchmarks.chaos", f"--first {seed} --seeds 1", *options, f"--state {state}"])
