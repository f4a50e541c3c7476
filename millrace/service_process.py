"""What the process of every service has: options, `--version`, its end by an error or a signal, and a garbage collector
that seldom looks."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from millrace import __version__
from millrace.errors import MillraceError


def option(variable: str, text: str, *names: str, **more: Any) -> Any:
    """An option whose value may also come from the environment variable; `text` is its help. The rest is as
    `typer.Option` takes it."""
    return typer.Option(*names, envvar=variable, help=text, **more)


def _print_version(asked: bool) -> None:
    if asked:
        from millrace.wire.channel import PROTOCOL_VERSION  # imports gRPC

        typer.echo(f"millrace {__version__}, protocol {PROTOCOL_VERSION}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print release and protocol version, and exit."
    ),
]
"""Two services work together only if their protocol versions are equal."""


@contextlib.contextmanager
def ends_with_message(service: str) -> Iterator[None]:
    """A MillraceError ends the process with status 1 and a line that begins with the name of the service."""
    try:
        yield
    except MillraceError as error:
        typer.echo(f"{service}: {error}", err=True)
        raise typer.Exit(1) from None


def stop_signal() -> asyncio.Event:
    """Is set by SIGTERM and SIGINT, on the running event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


NEW_OBJECTS = 20_000
"""Number of new objects after which the collector looks at them. By default it does with 700."""


def collect_rarely() -> None:
    """Lets the garbage collector look more rarely, and never again at what exists by now.

    Nearly all that it looks at lives as long as the process, and meanwhile no call is answered: with 1,000 members it
    took a sixth of a coordinator's processor time, and a replica with 2,000 sessions stood still for up to 12 ms, and
    for 0.2 s when it looked at everything.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 10, 50)
