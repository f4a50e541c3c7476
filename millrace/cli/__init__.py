"""The `millrace` command. Each group of commands is a module here; a new one is one file and one line below."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import typer

from millrace.cli import compare, doctor, jobs, logs, plan, show, stack, top, users, validate
from millrace.errors import InvalidState
from millrace.interrupt import importing
from millrace.service_process import VersionOption
from millrace.software import how_to_install
from millrace.terminal.output import ErrorReporting

app = typer.Typer(
    name="millrace",
    cls=ErrorReporting,
    help="Reinforcement learning for language models as three services: start them, submit jobs, watch them.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
LOCAL, JOBS = "This machine", "Jobs"
PASSED_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""Settings of a command that passes its options, also --help, to another program."""

DEMO_NEEDS = ("pyarrow", "torch", "transformers")
"""Packages that the demo imports; which engine and backend it needs, its options say."""


@app.callback()
def main(version: VersionOption = False) -> None:
    """Options of the command itself."""


@app.command("bench", rich_help_panel=LOCAL, **PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure parts of the system on this machine: publication, plan."""
    from millrace.bench import app as benches  # imports torch

    benches(context.args, prog_name="millrace bench")


@app.command("demo", rich_help_panel=LOCAL, **PASSED_ON)
def demo(context: typer.Context) -> None:
    """See a small language model learn, through all three services, in some minutes on two CPU cores."""
    if missing := [package for package in DEMO_NEEDS if importlib.util.find_spec(package) is None]:
        what = f"the demo needs packages that are not installed here: {', '.join(missing)}."
        raise InvalidState(what, "run `make demo` in the checkout, which installs them, or `make install` once.")
    with importing():
        from millrace.demo.run import app as demonstration

    demonstration(context.args, prog_name="millrace demo")


@app.command("export", rich_help_panel=JOBS, **PASSED_ON)
def export(context: typer.Context) -> None:
    """Write a checkpoint's model for other programs: Hugging Face, Megatron-Core, torch. No service needs to run."""
    if not all(importlib.util.find_spec(package) for package in ("torch", "transformers")):
        raise InvalidState("torch or transformers is not installed here.", f"{how_to_install('transformers')}.")
    done = subprocess.run([sys.executable, "-m", "services.trainer.checkpoints.export", *context.args], check=False)
    raise typer.Exit(done.returncode)


COMMANDS: dict[str, tuple[Callable[..., object], ...]] = {
    LOCAL: (stack.up, stack.scale, logs.logs, doctor.doctor),
    JOBS: (
        *(validate.validate, plan.plan, top.top, jobs.submit, jobs.watch, jobs.jobs, jobs.note),
        *(show.show, show.report, compare.compare, show.diagnose, jobs.events),
        *(jobs.pause, jobs.resume, jobs.cancel, jobs.delete, jobs.fleet, jobs.drain),
    ),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(command.__name__, rich_help_panel=panel)(command)
app.add_typer(jobs.webhooks, name="webhook", rich_help_panel=JOBS)
app.add_typer(users.app, name="users", rich_help_panel=JOBS)
