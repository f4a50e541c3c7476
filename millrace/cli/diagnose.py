"""`millrace diagnose`: what slows a job down, and what to change."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from millrace.cli.names import JobName, job_id
from millrace.rest.diagnosis import DiagnosisView, FindingView
from millrace.telemetry.metrics.declaration import Unit
from millrace.terminal.output import AsJson, Url, connect, number, people, print_json, table

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
    said = [f"Steps {found.from_step} to {found.to_step}: {found.step_s:.3g} s a step."]
    if not found.from_spans:
        said.append("[dim]No spans of these steps are kept: judged from step metrics alone.[/]")
    spent = sorted(found.loop_s.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{cause.replace('_', ' ')} {100 * s / found.step_s:.0f} %" for cause, s in spent)
    said.append(f"[dim]The loop was at: {parts}[/]")
    if found.bottleneck is None:
        said.append("Nothing slows the job down much.")
    return said


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
