"""`millrace show`: one job on one screen."""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from millrace.cli.names import JobName, job_id
from millrace.client import Client
from millrace.errors import InvalidState, NotFound, wrong_value
from millrace.rest import ImageView, JobView, LedgerView, SampleView
from millrace.rest.diagnosis import DiagnosisView, FindingView
from millrace.telemetry.metrics.declaration import Unit
from millrace.terminal.output import (
    AsJson,
    Url,
    connect,
    duration,
    held_out,
    ledger_line,
    number,
    people,
    print_json,
    styled,
    table,
    warning_line,
)

MAIN_METRICS = (
    "critic/score/mean",
    "critic/rewards/mean",
    "training/groups_without_signal",
    "training/staleness/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/entropy",
    "actor/lr",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "rollout_corr/kl",
    "training/rollout_probs_diff_mean",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "publication/pause_s",
    "perf/throughput",
    "perf/mfu/actor",
    "perf/max_memory_allocated_gb",
)
"""What to look at first: learning, answers, the update, engine against trainer, speed."""


def show(
    job: JobName,
    samples: Annotated[int, typer.Option(help="How many sampled answers to print.", min=0)] = 0,
    images: Annotated[
        Path | None, typer.Option(help="Folder to write the images of the printed answers' prompts to.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Print every metric of the last step.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show one job: its state, its prompts, the metrics of its last step that matter most, and where its files are."""
    if images is not None and not samples:
        raise InvalidState("--images: is given without --samples.", "say of how many answers, such as --samples 3.")
    with connect(url) as client:
        view = client.job(job_id(client, job))
        ledger = client.ledger(view.id)
        metrics = client.metrics(view.id, after_step=max(0, view.step - 1))
        answers = client.samples(view.id, limit=samples) if samples else []
        saved = save_images(client, view.id, answers, images) if images is not None else []
    if as_json:
        return print_json(
            {
                "job": view.model_dump(mode="json"),
                "ledger": ledger.model_dump(),
                "last_step": metrics[-1].model_dump(mode="json")["values"] if metrics else {},
                "samples": [answer.model_dump(mode="json") for answer in answers],
                **({"images": [asdict(each) for each in saved]} if images is not None else {}),
            }
        )
    console = people()
    rows = table("", "")
    for name, value in _facts(view, ledger, every):
        rows.add_row(f"[bold]{name}[/]", value)
    console.print(rows)
    if metrics:
        console.print(f"\n[bold]step {metrics[-1].step}[/]")
        values = metrics[-1].values
        console.print(every_metric(values) if every else main_metrics(values))
    for answer in answers:
        _print_sample(answer)
    if images is not None:
        console.print(f"\n{sum(not each.problem for each in saved)} images in {images.absolute()}", markup=False)
    for each in saved:
        if each.problem:
            console.print(f"image {each.number} of prompt {each.prompt_id}: {each.problem}", style="red", markup=False)


@dataclass(frozen=True)
class SavedImage:
    """One image of a prompt, as a file."""

    prompt_id: str
    number: int
    path: str
    """Empty if it could not be read."""
    problem: str = ""
    """Why it could not be read."""


def save_images(client: Client, job: str, samples: Sequence[SampleView], folder: Path) -> list[SavedImage]:
    """Writes the images of the samples' prompts to `folder`, each once, as PROMPT-NUMBER with the ending of its kind.
    What the job's data does not have any more is told instead. Raises InvalidState for a folder that cannot be
    written."""
    saved: dict[tuple[str, int], SavedImage] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written("--images", folder, error) from error
    for sample in samples:
        for place, image in enumerate(sample.images, 1):
            if (sample.prompt_id, place) in saved:
                continue
            path = folder / f"{sample.prompt_id}-{place}.{image.media_type.rpartition('/')[2]}"
            try:
                file = client.image(job, sample.prompt_id, place, image.sha256)
            except NotFound as error:
                found = SavedImage(sample.prompt_id, place, "", str(error))
            else:
                write(path, file, "--images")
                found = SavedImage(sample.prompt_id, place, str(path.absolute()))
            saved[sample.prompt_id, place] = found
    return list(saved.values())


def main_metrics(values: Mapping[str, float]) -> Table:
    """The metrics of MAIN_METRICS that a step has, two to a line."""
    rows = table("", ">", "", ">")
    cells = [(f"  {name}", f"{values[name]:.6g}") for name in MAIN_METRICS if name in values]
    for left, right in itertools.zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
        rows.add_row(*left, *right)
    if others := len(values) - len(cells):
        rows.add_row(f"  [dim]--all shows {others} more[/]")
    return rows


def every_metric(values: Mapping[str, float]) -> Table:
    rows = table("", ">")
    for name, amount in sorted(values.items()):
        rows.add_row(f"  {name}", f"{amount:.6g}")
    return rows


def _facts(job: JobView, ledger: LedgerView, every: bool) -> list[tuple[str, str]]:
    facts = [
        ("job", f"{job.id}  {escape(job.name)}"),
        ("state", styled(job.status)),
        *([("waits", f"[yellow]{escape(job.waiting.message)}[/]")] if job.waiting else []),
        *(("warning", f"[yellow]{escape(warning_line(warning))}[/]") for warning in job.warnings),
        ("step", f"{job.step} of {job.steps_shown}, weight version {job.version}"),
        ("reward", number(job.reward)),
        ("held-out", held_out(job, coverage=every)),
        *([("streaming", f"no: {escape(job.whole_steps)}")] if job.whole_steps else []),
        ("time", f"{duration(job.queued_s)} in the queue, then {duration(job.ran_s)}"),
        ("ledger", ledger_line(ledger)),
        ("model", escape(str(job.spec.get("model", {}).get("path", "")))),
        ("checkpoint", escape(job.checkpoint or "–")),
        ("report", escape(job.report or "–")),
        *([("tags", escape(", ".join(job.tags)))] if job.tags else []),
        *([("notes", escape(job.notes))] if job.notes else []),
    ]
    return [*facts, ("failure", f"[red]{escape(job.failure)}[/]")] if job.failure else facts


def _print_sample(sample: SampleView) -> None:
    console = people()
    versions = ", ".join(map(str, sample.versions))
    reward = number(sample.reward) if sample.reward_failure is None else escape(sample.reward_failure)
    advantage = "" if sample.advantage is None else f", advantage {sample.advantage:+.3g}"
    console.print(
        f"\n[bold]step {sample.step}, prompt {sample.prompt_id}[/]: reward {reward}{advantage}, "
        f"{sample.tokens} tokens of version {versions}, ended by {sample.stop_reason}"
    )
    console.print(sample.prompt, style="dim", markup=False)
    for place, image in enumerate(sample.images, start=1):
        console.print(f"[bold]image {place}[/]: {image_line(image)}", highlight=False)
    for place, turn in enumerate(sample.turns, start=1):
        summary = f"{turn.given_tokens} tokens given, {turn.sampled_tokens} sampled, reward {number(turn.reward)}"
        console.print(f"[bold]turn {place}[/]: {summary}, ended by {turn.stop_reason}")
        if turn.given:
            console.print(turn.given, style="dim", markup=False)
        console.print(turn.answer, markup=False)
    if not sample.turns:
        console.print(sample.answer, markup=False)


def image_line(image: ImageView) -> str:
    """Kind, size and hash of an image, in one line."""
    kind = image.media_type.rpartition("/")[2].upper() or "neither PNG, JPEG, WebP nor GIF"
    size = f", {image.width} x {image.height} pixels" if image.width is not None else ""
    return f"{kind}{size}, {image.bytes:,} bytes, sha256 {image.sha256[:16]}"


Step = Annotated[int | None, typer.Option(min=0, help="A step; by default the last ten are judged.")]


def diagnose(
    job: JobName, from_step: Step = None, to_step: Step = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Say what slows a job down: the bottleneck, the figures that say so, and what to change."""
    with connect(url) as client:
        found = client.diagnosis(job_id(client, job), from_step, to_step)
    if as_json:
        return print_json(found)
    console = people()
    for line in lines(found):
        console.print(line)
    for finding in found.findings:
        _print(console, finding)


def lines(found: DiagnosisView) -> list[str]:
    """What a step was spent on, with rich's markup."""
    if found.step_s <= 0:
        return ["No step is trained yet."]
    shown = [f"Steps {found.from_step} to {found.to_step}: {found.step_s:.3g} s a step."]
    if not found.from_spans:
        shown.append("[dim]No spans of these steps are kept: judged from step metrics alone.[/]")
    spent = sorted(found.loop_s.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{cause.replace('_', ' ')} {100 * s / found.step_s:.0f} %" for cause, s in spent)
    shown.append(f"[dim]The loop was at: {parts}[/]")
    if found.bottleneck is None:
        shown.append("Nothing slows the job down much.")
    shown += forecasts(found)
    return shown


def forecasts(found: DiagnosisView) -> Iterator[str]:
    """What other settings would give, with rich's markup."""
    if found.simulated_s is None:
        return
    error = f"{100 * (found.simulated_s / found.step_s - 1):+.0f} %".replace("-", "−")
    if not found.forecasts:
        yield f"[dim]Simulated, a step takes {found.simulated_s:.3g} s ({error}).[/]"
        return
    yield f"Simulated, a step takes {found.simulated_s:.3g} s ({error}). Other settings:"
    for other in found.forecasts:
        yield f"  [bold]{other.setting}[/]: {json.dumps(other.value)} → {other.step_s:.3g} s a step"


def _print(console: Console, finding: FindingView) -> None:
    name = finding.bottleneck.replace("_", " ")
    console.print(f"\n[bold]{name}[/], at most {100 * finding.share:.0f} % of the time: {escape(finding.message)}")
    rows = table("", ">", "")
    for figure in finding.figures:
        unit = "" if figure.unit in (Unit.SHARE, Unit.COUNT) else f" {figure.unit}"
        rows.add_row(f"  {escape(figure.name)}", f"{number(figure.value)}{unit}", f"[dim]{escape(figure.meaning)}[/]")
    if finding.figures:
        console.print(rows)
    for change in finding.changes:
        setting = f"[bold]{escape(change.setting)}[/]: " if change.setting else ""
        advice = escape(change.advice.replace("MEMBER", finding.member or "MEMBER"))
        console.print(f"  → {setting}{advice}")


def report(
    job: JobName = "last",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; without it, JOB.html with the job's id here."),
    ] = None,
    samples: Annotated[int, typer.Option(help="How many of the newest answers to include.", min=0, max=1000)] = 64,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write a job as one HTML file: curves of all metrics, samples, prompts, publications, events and the spec.

    The file needs no network and no other file, so it can be sent to others and kept. The job may still run.
    """
    from millrace.report import gather, report_page

    with connect(url) as client:
        contents = gather(client, job_id(client, job), samples)
    path = output if output is not None else Path(f"{contents.job.id}.html")
    written = write(path, report_page(contents).encode())
    if as_json:
        return print_json({"path": str(path.absolute()), "bytes": written})
    people().print(f"{path.absolute()}  {written / 1e6:.1f} MB", markup=False)


def write(path: Path, data: bytes, option: str = "--output") -> int:
    """Writes a file that the option names, or one in the folder that it names, whole or not at all. Returns its size in
    bytes. Raises InvalidState."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _not_written(option, path, error) from error
    return len(data)


def _not_written(option: str, path: Path, error: OSError) -> InvalidState:
    wrong = wrong_value(option, str(path), error.strerror or str(error), "name a file in a folder of yours.")
    return InvalidState(wrong.what, wrong.fix)
