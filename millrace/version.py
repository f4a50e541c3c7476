"""The `--version` option of the command and of every service."""

from typing import Annotated

import typer

from millrace import __version__


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
