"""The demo's task with several algorithms, or with all weights and adapters, and several seeds, on one local stack.

    python -m benchmarks.learning --only grpo,ppo --seeds 0,1 --steps 60
    python -m benchmarks.learning --compare adapters

Runs that are kept already are not repeated. Ends with status 1 where a run failed or did not learn.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.learning import page
from benchmarks.learning.jobs import COMPARISONS, Comparison, job_spec
from benchmarks.learning.results import Result, Results
from benchmarks.stacks import stack_in
from millrace.demo.run import MARGIN, Run
from millrace.errors import InvalidState, MillraceError
from millrace.rest import JobState
from millrace.terminal.output import print_error

RUN_TIMEOUT_S = 1800.0
Named = tuple[str, int]


def learning(
    compare: Annotated[str, typer.Option(help=f"{' or '.join(COMPARISONS)}.")] = "algorithms",
    only: Annotated[str, typer.Option(help="Some of the variants, by name with commas between; all by default.")] = "",
    seeds: Annotated[str, typer.Option(help="Of model, data and trainer, with commas between.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Of each run.", min=2)] = 60,
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    state: Annotated[Path, typer.Option(help="Folder for models, data, logs and results.")] = Path("state/learning"),
    to: Annotated[Path, typer.Option(help="The page that gets table and figure.")] = Path("BENCHMARKS.md"),
    again: Annotated[bool, typer.Option(help="Repeat runs that are kept already.")] = False,
) -> None:
    """Trains what is missing and writes table and figure."""
    comparison = _comparison(compare)
    names, numbers = _names(only, comparison), [int(seed) for seed in seeds.split(",")]
    state = state.resolve()
    results = Results(state / "results", steps)
    # Seed by seed: an engine that holds a seed's model is kept for the next algorithm's job.
    wanted = [(name, seed) for seed in numbers for name in names]
    missing = [run for run in wanted if again or results.find(*run) is None]
    print(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them kept already", flush=True)
    failures = _train(missing, comparison, results, state, engine) if missing else []
    kept = [result for name in names for seed in numbers if (result := results.find(name, seed)) is not None]
    if kept:
        page.write(to, comparison, kept, MARGIN)
        print(f"written: {to}", flush=True)
    idle = [f"{r.variant} with seed {r.seed} rose by {r.after - r.before:.2f}" for r in kept]
    idle = [line for line, r in zip(idle, kept, strict=True) if r.after - r.before < MARGIN]
    for line in [*failures, *idle]:
        print(f"NOT learnt: {line}", flush=True)
    raise typer.Exit(1 if failures or idle else 0)


def _comparison(name: str) -> Comparison:
    if name not in COMPARISONS:
        raise InvalidState(f"--compare: there is no comparison {name!r}.", f"choose from {', '.join(COMPARISONS)}.")
    return COMPARISONS[name]


def _names(only: str, comparison: Comparison) -> list[str]:
    names = only.split(",") if only else list(comparison.variants)
    if unknown := [name for name in names if name not in comparison.variants]:
        fix = f"choose from {', '.join(comparison.variants)}."
        raise InvalidState(f"--only: there is no variant {unknown[0]!r}.", fix)
    return names


def _train(missing: list[Named], comparison: Comparison, results: Results, state: Path, engine: str) -> list[str]:
    """Runs them one after the other; what failed, with the reason."""
    data = {seed: _prepared(state, seed) for seed in dict.fromkeys(seed for _, seed in missing)}
    failures = []
    with stack_in(state / time.strftime("stack-%Y%m%d-%H%M%S"), engine=engine) as (_, client):
        for number, (name, seed) in enumerate(missing, 1):
            spec = job_spec(state, name, comparison.variants[name], seed, results.steps, data[seed])
            job = client.wait(client.submit(spec).id, RUN_TIMEOUT_S)
            label = f"{number} of {len(missing)}: {name}, seed {seed}"
            if job.state is not JobState.SUCCEEDED:
                failures.append(f"{name} with seed {seed} {job.state}: {job.failure}")
                print(f"{label}: {job.state}: {job.failure}", flush=True)
                continue
            result = Result.of(name, seed, job, client.metrics(job.id))
            results.keep(result)
            print(f"{label}: {result.before:.3f} → {result.after:.3f} in {result.seconds:.0f} s", flush=True)
    return failures


def _prepared(state: Path, seed: int) -> tuple[Path, Path]:
    from millrace.demo.model import WarmUp, made_model
    from millrace.demo.tasks import TASKS, write_task_data

    made_model(Run(state, seed).model_folder, WarmUp(seed=seed))
    return write_task_data(TASKS["reverse"], state / f"data-{seed}", seed)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(learning)
    try:
        app(prog_name="python -m benchmarks.learning")
    except MillraceError as error:
        print_error(error)
        sys.exit(1)
