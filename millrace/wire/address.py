"""Addresses: how others reach this host, where a server listens, and what a server needs that other hosts reach."""

import os
import socket
from typing import Annotated, Any

import psutil
import structlog
import typer

from millrace.errors import InvalidState
from millrace.wire.channel import token
from millrace.wire.reach import is_loopback
from millrace.wire.tls import identity

log = structlog.get_logger(__name__)
EVERYWHERE = "0.0.0.0"
CoordinatorOption = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_COORDINATOR", help="host:port of the coordinator's gRPC server; of several, with commas."
    ),
]
HostOption = Annotated[
    str, typer.Option(envvar="MILLRACE_HOST", help="Address at which others reach this host; empty: detected.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", envvar="MILLRACE_INSECURE", help="Serve other hosts without a token or TLS: anybody may call."
    ),
]


def host_address() -> str:
    """The name or address by which other hosts reach this one: MILLRACE_HOST, or the first address of its name."""
    if host := os.environ.get("MILLRACE_HOST"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def advertise(host: str) -> None:
    """Makes this process known to others at `host`, or at MILLRACE_HOST if `host` is empty, for weights as well:
    Gloo listens at the network interface that has this address, unless GLOO_SOCKET_IFNAME names another one. By
    itself Gloo takes the address of the host's name, which may be the loopback."""
    if host:
        os.environ["MILLRACE_HOST"] = host
    named = os.environ.get("MILLRACE_HOST", "")
    if named and not is_loopback(named) and (interface := interface_of(named)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(host: str) -> str:
    """Name of the network interface of this machine that has the address of `host`; empty if none has."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return ""
    interfaces: dict[str, Any] = psutil.net_if_addrs()  # Any: psutil's types are those of no platform
    of_each = {name: {entry.address.partition("%")[0] for entry in each} for name, each in interfaces.items()}
    return next((name for name, its_own in of_each.items() if its_own & addresses), "")


def host_name() -> str:
    """The name of this host for those who only compare it with others': the same in all processes here, another on
    every other host."""
    host = host_address()
    return socket.gethostname() if is_loopback(host) else host


def bind_address(host: str) -> str:
    """The address at which a member listens that others reach at `host`: the loopback for members of one host, else all
    addresses."""
    return host if is_loopback(host) else EVERYWHERE


def require_protection(*hosts: str, insecure: bool) -> None:
    """Refuses to serve other hosts without a token, as a job names code that is run, and without TLS unless
    MILLRACE_PLAINTEXT=1 says that the network is trusted. `hosts`: where the service listens. `insecure`: the operator
    wants neither. Raises InvalidState, also for files of TLS that cannot be used."""
    encrypted = identity() is not None or os.environ.get("MILLRACE_PLAINTEXT", "") in ("1", "true")
    exposed = [host for host in dict.fromkeys(hosts) if not is_loopback(host)]
    if not exposed or (token() and encrypted):
        return
    where = ", ".join(exposed)
    if not token():
        what = f"no token is set, and other hosts can reach {where}: whoever does could run code here."
        fix = "set MILLRACE_TOKEN, the same for all services and clients, or serve this host alone (127.0.0.1)"
    else:
        what = f"TLS is not set up, and other hosts can reach {where}: tokens, prompts and weights could be read there."
        fix = (
            "set MILLRACE_TLS_CERT, MILLRACE_TLS_KEY and MILLRACE_TLS_CA (docs/security.md), or MILLRACE_PLAINTEXT=1"
            " if nobody else is on the network, or serve this host alone (127.0.0.1)"
        )
    if not insecure:
        raise InvalidState(what, f"{fix}; --insecure starts without a token and without TLS.")
    log.warning(what, fix=fix)
