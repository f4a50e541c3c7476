"""`millrace validate`: checks a job spec on this machine, without a coordinator."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.admission.advice import across_hosts
from millrace.cli.settings import Settings, SpecFile, Variant, changes_of, known_engine, read
from millrace.terminal.output import AsJson, people, print_json
from millrace.validation.limits import MOST_RANKS

if TYPE_CHECKING:
    from millrace.spec import JobSpec

WORTH_SHOWING = 10_000
"""Rows from which on a terminal shows how far the reading is."""


def validate(
    spec: SpecFile,
    fields_only: Annotated[
        bool, typer.Option("--fields-only", help="Do not check the files that the spec names.")
    ] = False,
    settings: Settings = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Predict the memory of trainer and replicas by part.")
    ] = False,
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", min=1, max=10_000, help="Memory of one GPU in GiB, for --memory.")
    ] = 80.0,
    trainer_gpus: Annotated[
        int | None,
        typer.Option(
            "--trainer-gpus", min=1, max=MOST_RANKS, help="GPUs of the trainer; the fewest possible if not given."
        ),
    ] = None,
    gpus_per_host: Annotated[
        int, typer.Option("--gpus-per-host", min=1, max=MOST_RANKS, help="GPUs of each host of the trainer.")
    ] = 8,
    judges: Annotated[
        bool, typer.Option("--judges", help="Ask each judge of the reward once, about the first row.")
    ] = False,
    engine: Annotated[str, typer.Option("--engine", help="Engine of the replicas, for --memory.")] = "vllm",
    as_json: AsJson = False,
) -> None:
    """Check a job spec: its fields, and the model, data and reward that it names.

    Every row is read, prompts are made into tokens, and the reward function is called for a few rows, in the process in
    which a replica would call it. The files have to be on this machine; use --fields-only if the job will run on
    another one. With --memory the peak of a GPU is predicted by part from the model's config, with the settings that
    would lower it. With --trainer-gpus of several hosts it names fields that make GPUs of different hosts exchange more
    than need be. If the spec is not valid, the command prints every mistake with its line and fix, and ends with
    status 1.
    """
    from millrace import hub
    from millrace.admission import submission, thorough
    from millrace.admission.advice import advice

    (document, checked), notes = read(spec, Variant("", changes_of(settings))), list[str]()
    if not fields_only:
        with document.lines():
            pinned = submission.check(checked.model_dump(mode="json"))
            for line in thorough.look(hub.local(pinned, data=True), _progress, judges=judges):
                if not as_json:
                    people().print(line, markup=False)
    if as_json:
        return print_json(checked)
    if memory:
        notes = list(_memory(hub.local(checked), gpu_memory, trainer_gpus, engine))
    across = [] if trainer_gpus is None else across_hosts(checked, trainer_gpus, gpus_per_host)
    for note in (*notes, *advice(checked), *across):
        people().print(str(note), markup=False)
    checked_parts = "the fields are valid" if fields_only else "the fields are valid; model, data and reward are usable"
    people().print(f"{spec}: {checked_parts}.", markup=False)


def _memory(spec: "JobSpec", gpu_memory_gib: float, trainer_gpus: int | None, engine: str) -> Iterable[str]:
    """The lines of `--memory`. Raises InvalidJob if the model's config cannot be read, NotFound for an engine that
    does not exist, and InvalidState for a number of GPUs that the options do not allow."""
    from millrace.memory import text
    from millrace.memory.prediction import fewest_ranks, predict_replica
    from millrace.memory.shape import decoder_shape

    known_engine(engine)
    shape, gpu_bytes = decoder_shape(Path(spec.model.path)), gpu_memory_gib * text.GIB
    ranks = trainer_gpus or fewest_ranks(spec)
    yield from text.trainer_lines(spec, shape, ranks, gpu_bytes)
    yield from text.replica_lines(predict_replica(spec, shape, engine, gpu_bytes), gpu_bytes)


def _progress(things: Iterable[Any], what: str, count: int) -> Iterable[Any]:
    """Passes `things` on, with a bar on a terminal if there are many."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = count < WORTH_SHOWING or not console.is_terminal
    return track(things, what, total=count, console=console, transient=True, disable=hidden)
