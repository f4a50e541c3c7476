"""`millrace doctor`: what is installed on this machine and works, and why the rest does not."""

import typer
from rich.markup import escape

from millrace.backends import BACKEND_NAMES
from millrace.cli.probes import Verdict, can, examine
from millrace.engines import ENGINE_NAMES
from millrace.terminal.output import AsJson, people, print_json, table

MARKS = {
    Verdict.GOOD: "[green]ok[/]",
    Verdict.WARNING: "[yellow]untested[/]",
    Verdict.MISSING: "[dim]missing[/]",
    Verdict.BROKEN: "[red]broken[/]",
}


def doctor(as_json: AsJson = False) -> None:
    """Show what is installed on this machine, what works, and why the rest does not.

    Imports every engine and backend once, which takes some seconds. Status 1 if this machine can neither generate nor
    train.
    """
    findings = examine()
    serves, trains = can(findings, ENGINE_NAMES), can(findings, BACKEND_NAMES)
    if as_json:
        print_json({"findings": [f.to_dict() for f in findings], "generates_with": serves, "trains_with": trains})
        raise typer.Exit(0 if serves or trains else 1)
    rows = table("", "FOR", "", "FOUND")
    rows.columns[-1].no_wrap = False
    for f in findings:
        found = escape(f.found) + (f"\n[dim]{escape(f.fix)}[/]" if f.fix else "")
        rows.add_row(f"[bold]{f.name}[/]", f.need, MARKS[f.verdict], found)
    console = people()
    console.print(rows)
    for what, names in (("generate", serves), ("train", trains)):
        console.print(f"can {what} with {', '.join(names)}" if names else f"[red]cannot {what}[/]: see above")
    raise typer.Exit(0 if serves or trains else 1)
