"""`millrace demo`: makes model and data, starts the stack, trains, and says whether the model learned."""

import errno
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from millrace.backends import BACKEND_NAMES
from millrace.client import Client
from millrace.engines import ENGINE_NAMES
from millrace.errors import InvalidJob, InvalidState
from millrace.local.options import StackOptions, pythons
from millrace.local.ports import free_port
from millrace.local.stack import Stack
from millrace.rest import JobState, JobView, LedgerView, StepMetrics
from millrace.rest.coverage import covered
from millrace.spec import JobSpec, parse
from millrace.spec.document import merged
from millrace.terminal.output import ledger_line, number, people
from millrace.terminal.watch import show_live

if TYPE_CHECKING:
    from millrace.demo.model import Family, Size


MARGIN = 0.30
"""The held-out score has to rise by this much, or the demo fails."""
JOB = Path(__file__).with_name("job.yaml")
GROWN = Path(__file__).with_name("grown.yaml")
"""What is other in the job of the grown model."""
LORA_RATE = 10
"""Learning rate of adapters over that of all weights."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
PythonOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ENGINE=PATH", help="Interpreter of the replicas with an engine; as often as needed."),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Of the model, the data and the trainer.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="GRPO steps.", min=1)] = 60,
    replicas: Annotated[int, typer.Option(help="Rollout replicas.", min=1)] = 1,
    ranks: Annotated[int, typer.Option(help="Trainer ranks.", min=1)] = 1,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINE_NAMES)}; or several with commas.")] = "vllm",
    python: PythonOption = None,
    backend: Annotated[str, typer.Option(help=f"Training backend: {' or '.join(BACKEND_NAMES)}.")] = "fsdp2",
    task: Annotated[str, typer.Option(help="reverse, hunt (turns with a tool), or look (pictures).")] = "reverse",
    size: Annotated[str, typer.Option(help="Of the model: small, or grown, for GPUs.")] = "small",
    model: Annotated[
        str | None, typer.Option(help="qwen3; qwen3.5, with a layer of GatedDeltaNet; qwen2.5-vl, for the task look.")
    ] = None,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train adapters of this rank instead of all weights.", min=1)
    ] = None,
    share_gpus: Annotated[bool, typer.Option(help="As of millrace up.")] = False,
    state: Annotated[
        Path,
        typer.Option(help="Folder for the model, the data, logs and results; by default below the current folder."),
    ] = Path("state/demo"),
    keep_state: Annotated[bool, typer.Option(help="Keep the stack's Redis data and logs after success.")] = False,
) -> None:
    """A small language model learns a task, through the three services. Needs no network and no GPU.

    Status 0 only if the reward on held-out cases rose by the margin that the README states.
    """
    begun, state = time.monotonic(), _writable(state)
    options = StackOptions(
        # A stack's state is not shared between runs: each demo begins with an empty ledger.
        state=str(state / time.strftime("stack-%Y%m%d-%H%M%S")),
        replicas=replicas,
        ranks=ranks,
        engine=engine,
        pythons=pythons(python or []),
        share_gpus=share_gpus,
        http_port=free_port(),
        grpc_port=free_port(),
        environment={name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()},
    )
    chosen = _size(size)  # which imports torch: what is wrong with the options above is told before
    spec = Run(state, seed, steps, backend, chosen, lora, task, _family(model, chosen, task)).prepared()
    made_s = time.monotonic() - begun
    print(
        f"starting coordinator, trainer and {replicas} {engine} replica(s); logs: {options.folder / 'logs'}", flush=True
    )
    with Stack(options) as stack, Client(stack.url) as client:
        started_s = time.monotonic() - begun - made_s
        job = client.submit(spec)
        print(f"the page of the job: {stack.url}/#/job/{job.id}", flush=True)
        show_live(client, job.id)
        outcome = Outcome.of(client, job.id, MARGIN)
    total_s = time.monotonic() - begun
    print_outcome(outcome, {"model and data": made_s, "stack": started_s, "job": total_s - made_s - started_s})
    if outcome.learned and not keep_state:
        shutil.rmtree(options.folder)
    raise typer.Exit(0 if outcome.learned else 1)


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and where its files are."""

    state: Path
    seed: int = 0
    steps: int = 60
    backend: str = "fsdp2"
    size: "Size" = "small"
    lora: int | None = None
    """Rank of adapters; None: all weights are trained."""
    task: str = "reverse"
    family: "Family" = "qwen3"

    def prepared(self) -> JobSpec:
        """Makes model and data, and the job about them. Raises InvalidJob for a task that does not exist."""
        from millrace.demo.tasks import task_named, write_task_data

        task = task_named(self.task)
        from millrace.demo.model import WarmUp, made_model

        print(f"making the model (once a seed) and the data in {self.state}", flush=True)
        made_model(self.model_folder, WarmUp(self.seed, self.size, self.task, self.family, task.until))
        data = self.state / self._name("data", size="small", family="qwen3")
        return self.job_spec(write_task_data(task, data, self.seed))

    @property
    def model_folder(self) -> Path:
        return self.state / self._name("model")

    def job_spec(self, data: tuple[Path, Path]) -> JobSpec:
        """The job of `job.yaml` with what task and size change, and with this run's folders; `data` is what to train on
        and what to hold out."""
        from millrace.demo.tasks import task_named

        tree = yaml.safe_load(JOB.read_text())
        for changes in (task_named(self.task).changes, GROWN if self.size == "grown" else None):
            if changes is not None:
                tree = merged(tree, yaml.safe_load(changes.read_text()))
        tree["model"]["path"] = str(self.model_folder)
        tree["data"] |= {"files": [str(data[0])], "seed": self.seed}
        tree["evaluation"]["files"] = [str(data[1])]
        tree["trainer"] |= {"seed": self.seed, "backend": self.backend}
        optimizer = tree["trainer"]["optimizer"]
        if self.lora is not None:
            tree["model"]["lora"] = {"rank": self.lora, "alpha": self.lora}
            optimizer["lr"] *= LORA_RATE
        tree["schedule"]["steps"] = self.steps
        optimizer["warmup_steps"] = min(self.steps, optimizer["warmup_steps"])
        tree["output"] = str(self.state / time.strftime(f"{self._name('output', size='small')}-%Y%m%d-%H%M%S"))
        return parse(tree)

    def _name(self, what: str, *, size: str = "", family: str = "") -> str:
        """A folder's name: what it holds, then task, size and family if they are not the default, then the seed.
        `size` and `family`: those to take instead of the run's own."""
        chosen = ((self.task, "reverse"), (size or self.size, "small"), (family or self.family, "qwen3"))
        return "-".join([what, *(value for value, usual in chosen if value != usual), str(self.seed)])


def _writable(folder: Path) -> Path:
    """The absolute path of `folder`, which is made if it is not there. Raises InvalidState."""
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        fix = "name a folder that you may write to with --state, or run the demo in one."
        raise InvalidState(f"--state: {folder}: {error.strerror}.", fix) from error
    return folder


def _size(text: str) -> "Size":
    from millrace.demo.model import SIZES

    if text not in SIZES:
        raise InvalidJob(f"--size: there is no size {text!r}.", f"choose from {', '.join(SIZES)}.")
    return text


def _family(text: str | None, size: "Size", task: str) -> "Family":
    """The family asked for, or the usual one of the task. Raises InvalidJob."""
    from millrace.demo.model import FAMILIES
    from millrace.demo.tasks import task_named

    own = task_named(task).family
    family = own or "qwen3" if text is None else text
    if family not in FAMILIES:
        raise InvalidJob(f"--model: there is no model {family!r}.", f"choose from {', '.join(FAMILIES)}.")
    if own is not None and family != own:
        raise InvalidJob(f"--model: the task {task!r} needs {own}.", "leave --model out.")
    if own is None and family == "qwen2.5-vl":
        raise InvalidJob(f"--model: {family} is for --task look.", "add --task look, or leave --model out.")
    if family != "qwen3" and size != "small":
        raise InvalidJob(f"--model: there is no {family} of size {size!r}.", "leave --size out.")
    return family


PAUSE = "publication/pause_s"


@dataclass(frozen=True)
class Outcome:
    job: JobView
    ledger: LedgerView
    rows: list[StepMetrics]
    margin: float

    @classmethod
    def of(cls, client: Client, job_id: str, margin: float) -> "Outcome":
        return cls(client.job(job_id), client.ledger(job_id), client.metrics(job_id), margin)

    @property
    def rise(self) -> float | None:
        before, after = self.job.evaluation_before, self.job.evaluation_last
        return None if before is None or after is None else after - before

    @property
    def learned(self) -> bool:
        """The job succeeded, its ledger adds up, and the held-out score rose by the margin."""
        ledger = self.ledger
        adds_up = ledger.issued == (ledger.queued + ledger.leased + ledger.generated + ledger.trained + ledger.dropped)
        rose = self.rise is not None and self.rise >= self.margin
        return self.job.state is JobState.SUCCEEDED and adds_up and rose

    @property
    def mean_pause_s(self) -> float | None:
        """Seconds that generation stood still in a publication."""
        pauses = [row.values[PAUSE] for row in self.rows if PAUSE in row.values]
        return fmean(pauses) if pauses else None


def print_outcome(outcome: Outcome, seconds: dict[str, float], console: Console | None = None) -> None:
    job = outcome.job
    rows = Table.grid(padding=(0, 2))
    rows.add_row("job", f"{job.id} {job.state}" + (f": {job.failure}" if job.failure else ""))
    before = covered(number(job.evaluation_before), job.evaluation_before_coverage)
    after = covered(number(job.evaluation_last), job.evaluation_last_coverage)
    rows.add_row("held-out", f"{before} before, {after} after")
    rows.add_row("ledger", ledger_line(outcome.ledger))
    pause_s = outcome.mean_pause_s
    rows.add_row("mean pause", "–" if pause_s is None else f"{1000 * pause_s:.1f} ms a publication")
    rows.add_row("report", job.report or "–")
    rows.add_row("checkpoint", job.checkpoint or "–")
    rows.add_row("seconds", ", ".join(f"{part} {spent:.0f}" for part, spent in seconds.items()))
    console = console or people()
    console.print()
    console.print(rows)
    rise = number(outcome.rise)
    verdict = "learned" if outcome.learned else "NOT learned"
    console.print(f"[bold]{verdict}[/]: the held-out score rose by {rise}, {outcome.margin:.2f} is asked for.")
