"""Options that the trainer has however its ranks are started."""

from typing import Annotated

from millrace.service_process import ends_with_message, option
from millrace.wire.address import bind_address, host_address, require_protection

SILENT_S = 15.0
"""A heartbeat a second is expected. A rank of a busy host, or one that is inside a long call of a library, is late by
several seconds; a trainer that is ended wrongly loses its steps since the last checkpoint."""
PortOption = Annotated[int, option("MILLRACE_PORT", "Port of the trainer's gRPC server; 0: a free port.")]
SilentOption = Annotated[
    float,
    option(
        "MILLRACE_SILENT_S",
        "Seconds without a heartbeat after which a rank counts as dead or stopped, and the trainer ends.",
        min=3.0,
        max=3600.0,
    ),
]


def end_unprotected(insecure: bool) -> None:
    """Ends the process with status 1 and a message if other hosts could reach the trainer without token or TLS."""
    with ends_with_message("trainer"):
        require_protection(bind_address(host_address()), insecure=insecure)
