"""What the shell offers for names of jobs, members and services. It is silent where the coordinator does not answer."""

import contextlib
import re
import threading
from collections.abc import Callable
from pathlib import Path

import typer

from millrace.client import Client
from millrace.errors import MillraceError
from millrace.rest import MemberState

DEADLINE_S = 2.0
"""How long the coordinator may take to answer, looking up its address included."""
OFFERED_JOBS = 50
"""The newest jobs, so many, are offered."""
Candidates = list[tuple[str, str]]
"""Each with a text that some shells show next to it."""


def jobs(context: typer.Context, incomplete: str) -> Candidates:
    """Ids and names of jobs, and `last`. Names that a shell would split are left out."""

    def asked(client: Client) -> Candidates:
        found = client.jobs(limit=OFFERED_JOBS)
        names = {job.name: "the newest job of this name" for job in found if re.fullmatch(r"[\w.+-]+", job.name)}
        newest = [("last", found[0].name)] if found else []
        return [*newest, *names.items(), *((job.id, f"{job.name}, {job.status}") for job in found)]

    return _beginning(incomplete, _ask(context, asked))


def members(context: typer.Context, incomplete: str) -> Candidates:
    """Ids of the members that are in the fleet."""

    def asked(client: Client) -> Candidates:
        fleet = client.fleet()
        gone = (MemberState.LEFT, MemberState.LOST)
        found = [member for member in (*fleet.trainers, *fleet.replicas) if member.state not in gone]
        return [(member.id, f"{member.kind}, {member.state}") for member in found]

    return _beginning(incomplete, _ask(context, asked))


def services(context: typer.Context, incomplete: str) -> Candidates:
    """Services of the local stack that have a log, and the members of the fleet."""
    logs = Path(context.params.get("state") or "state") / "logs"
    return _beginning(incomplete, [(path.stem, "") for path in sorted(logs.glob("*.log"))]) or members(
        context, incomplete
    )


def _beginning(incomplete: str, candidates: Candidates) -> Candidates:
    return [candidate for candidate in candidates if candidate[0].startswith(incomplete)]


def _ask(context: typer.Context, question: Callable[[Client], Candidates]) -> Candidates:
    """The coordinator's answer, or nothing if it does not answer in time."""
    import httpx  # noqa: F401  # what the client imports when it is used first does not count in the deadline

    import millrace.wire.channel  # noqa: F401

    found: Candidates = []

    def asked() -> None:
        with contextlib.suppress(MillraceError), Client(context.params.get("url"), patience_s=0) as client:
            found.extend(question(client))

    thread = threading.Thread(target=asked, daemon=True)  # the process ends without waiting for it
    thread.start()
    thread.join(DEADLINE_S)
    return list(found)
