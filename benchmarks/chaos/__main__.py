"""`python -m benchmarks.chaos`: the faults of several seeds, one stack after another, or several side by side.

Ends with status 1 where a line of "What always holds" did not hold, or a job did not go on.
"""

import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.chaos import table
from benchmarks.chaos.faults import Target
from benchmarks.chaos.trial import Outcome, Shape, Struck, attempted
from millrace.errors import InvalidState, MillraceError
from millrace.terminal.output import print_error

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
    carried: Annotated[int, typer.Option(help="Prompts that each job carries from step to step.", min=0)] = 0,
    publishing: Annotated[bool, typer.Option(help="Strike within publications only.")] = False,
    at_once: Annotated[int, typer.Option(help="Stacks side by side; a stack keeps two cores busy.", min=1)] = 1,
) -> None:
    """Prints a line for each fault and the seconds of each kind."""
    shape = Shape(faults, engine, replicas, ranks, patience_s, _targets(only), carried, publishing)
    folder = state.resolve() / time.strftime("%Y%m%d-%H%M%S")
    options = [f"--faults {faults} --engine {engine} --replicas {replicas} --ranks {ranks}"]
    options += [f"--only {only}"] if only else []
    options += [f"--carried {carried}"] if carried else []
    options += ["--publishing"] if publishing else []
    struck: list[Struck] = []
    failed: list[int] = []
    for outcome in _outcomes(range(first, first + seeds), folder, shape, at_once):
        struck += outcome.struck
        print(table.summary(outcome), flush=True)
        if not outcome.sound:
            failed.append(outcome.seed)
            print(table.failure(outcome, table.repeating(outcome.seed, options, state)), flush=True)
    print(f"\n{len(struck)} faults, {seeds - len(failed)} of {seeds} jobs without a finding\n", flush=True)
    print(table.by_kind(struck), flush=True)
    raise typer.Exit(1 if failed else 0)


def _targets(names: str) -> tuple[Target, ...]:
    if unknown := [name for name in names.split(",") if name and name not in NAMES]:
        raise InvalidState(f"there are no processes named {unknown[0]!r}.", f"choose from {', '.join(NAMES)}.")
    return tuple(NAMES[name] for name in names.split(",")) if names else tuple(Target)


def _outcomes(seeds: range, folder: Path, shape: Shape, at_once: int) -> Iterator[Outcome]:
    """The outcome of each seed as it comes. The faults of one stack at a time are printed as they happen, those of
    stacks side by side when their trial has ended."""
    if at_once == 1:
        for seed in seeds:
            print(f"\nseed {seed}\n{table.HEADER}", flush=True)
            yield attempted(seed, folder / f"seed-{seed}", shape, lambda struck: print(table.line(struck), flush=True))
        return
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(attempted, seed, folder / f"seed-{seed}", shape) for seed in seeds]
        for future in as_completed(running):
            outcome = future.result()
            print("\n".join([f"\nseed {outcome.seed}", table.HEADER, *map(table.line, outcome.struck)]), flush=True)
            yield outcome


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(chaos)
    try:
        app(prog_name="python -m benchmarks.chaos")
    except MillraceError as error:
        print_error(error)
        sys.exit(1)
