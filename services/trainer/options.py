"""Options that the trainer has however its ranks are started."""

import sys
from typing import Annotated

import typer

from millrace.errors import MillraceError
from millrace.wire.address import bind_address, host_address, require_protection

SILENT_S = 15.0
"""A heartbeat a second is expected. A rank of a busy host, or one that is inside a long call of a library, is late by
several seconds; a trainer that is ended wrongly loses its steps since the last checkpoint."""
PortOption = Annotated[
    int, typer.Option(envvar="MILLRACE_PORT", help="Port of the trainer's gRPC server; 0: a free port.")
]
SilentOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_SILENT_S",
        min=3.0,
        max=3600.0,
        help="Seconds without a heartbeat after which a rank counts as dead or stopped, and the trainer ends.",
    ),
]


def end_unprotected(insecure: bool) -> None:
    """Ends the process with status 1 and a message if other hosts could reach the trainer without token or TLS."""
    try:
        require_protection(bind_address(host_address()), insecure=insecure)
    except MillraceError as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
