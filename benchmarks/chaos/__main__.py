"""`python -m benchmarks.chaos`: the faults of several seeds, one stack after another.

Ends with status 1 where a line of "What always holds" did not hold, or a job did not go on.
"""

import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.chaos import table
from benchmarks.chaos.faults import Target
from benchmarks.chaos.trial import Outcome, Shape, Struck, trial
from millrace.cli.output import print_error
from millrace.errors import InvalidState, MillraceError

NAMES = {target.name.lower(): target for target in Target}


def chaos(
    seeds: Annotated[int, typer.Option(help="How many, one job each.", min=1)] = 5,
    first: Annotated[int, typer.Option(help="The first seed.", min=0)] = 0,
    faults: Annotated[int, typer.Option(help="Faults of each seed.", min=1)] = 10,
    engine: Annotated[str, typer.Option(help="Engine of the replicas, several with commas.")] = "transformers",
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    ranks: Annotated[int, typer.Option(help="Of the trainer.", min=1)] = 2,
    only: Annotated[str, typer.Option(help=f"Of {', '.join(NAMES)}, with commas; empty: all.")] = "",
    patience_s: Annotated[float, typer.Option(help="Longest time until the next step.", min=1.0)] = 180.0,
    state: Annotated[Path, typer.Option(help="Folder for logs, Redis, jobs and checkpoints.")] = Path("state/chaos"),
) -> None:
    """Prints a line for each fault and the seconds of each kind."""
    shape = Shape(faults, engine, replicas, ranks, patience_s, _targets(only))
    folder = state.resolve() / time.strftime("%Y%m%d-%H%M%S")
    options = [f"--faults {faults} --engine {engine} --replicas {replicas} --ranks {ranks}"]
    options += [f"--only {only}"] if only else []
    struck: list[Struck] = []
    failed: list[int] = []
    for seed in range(first, first + seeds):
        print(f"\nseed {seed}\n{table.HEADER}", flush=True)
        outcome = _outcome(seed, folder / f"seed-{seed}", shape)
        struck += outcome.struck
        print(table.summary(outcome), flush=True)
        if not outcome.sound:
            failed.append(seed)
            print(table.failure(outcome, table.repeating(seed, options, state)), flush=True)
    print(f"\n{len(struck)} faults, {seeds - len(failed)} of {seeds} jobs without a finding\n", flush=True)
    print(table.by_kind(struck), flush=True)
    raise typer.Exit(1 if failed else 0)


def _targets(names: str) -> tuple[Target, ...]:
    if unknown := [name for name in names.split(",") if name and name not in NAMES]:
        raise InvalidState(f"there are no processes named {unknown[0]!r}.", f"choose from {', '.join(NAMES)}.")
    return tuple(NAMES[name] for name in names.split(",")) if names else tuple(Target)


def _outcome(seed: int, folder: Path, shape: Shape) -> Outcome:
    outcome = Outcome(seed, -1, folder)
    try:
        return trial(seed, folder, shape, lambda struck: print(table.line(struck), flush=True))
    except Exception as error:  # the other seeds are still of use
        traceback.print_exc()
        outcome.found.append(f"{type(error).__name__}: {error}")
        return outcome


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(chaos)
    try:
        app(prog_name="python -m benchmarks.chaos")
    except MillraceError as error:
        print_error(error)
        sys.exit(1)
