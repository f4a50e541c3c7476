"""Options that the trainer has however its ranks are started."""

from typing import Annotated

import typer

SILENT_S = 15.0
"""A heartbeat a second is expected. A rank of a busy host, or one that is inside a long call of a library, is late by
several seconds; a trainer that is ended wrongly loses its steps since the last checkpoint."""
SilentOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_SILENT_S",
        min=3.0,
        max=3600.0,
        help="Seconds without a heartbeat after which a rank counts as dead or stopped, and the trainer ends.",
    ),
]
