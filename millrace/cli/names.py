"""Jobs and members as people name them on the command line: by id, the beginning of one, or a job's name; and the names
that a shell offers when TAB is pressed, as the coordinator knows them."""

import contextlib
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from millrace.client import Client
from millrace.errors import InvalidState, MillraceError, NotFound
from millrace.rest import MemberState
from millrace.validation.names import closest

DEADLINE_S = 2.0
"""How long the coordinator may take to answer, looking up its address included."""
OFFERED_JOBS = 50
"""The newest jobs, so many, are offered."""
Candidates = list[tuple[str, str]]
"""Each with a text that some shells show next to it."""


def complete_jobs(context: typer.Context, incomplete: str) -> Candidates:
    """Ids and names of jobs, and `last`. Names that a shell would split are left out."""

    def asked(client: Client) -> Candidates:
        found = client.jobs(limit=OFFERED_JOBS)
        names = {job.name: "the newest job of this name" for job in found if re.fullmatch(r"[\w.+-]+", job.name)}
        newest = [("last", found[0].name)] if found else []
        return [*newest, *names.items(), *((job.id, f"{job.name}, {job.status}") for job in found)]

    return _beginning(incomplete, _ask(context, asked))


def complete_members(context: typer.Context, incomplete: str) -> Candidates:
    """Ids of the members that are in the fleet."""

    def asked(client: Client) -> Candidates:
        fleet = client.fleet()
        gone = (MemberState.LEFT, MemberState.LOST)
        found = [member for member in (*fleet.trainers, *fleet.replicas) if member.state not in gone]
        return [(member.id, f"{member.kind}, {member.state}") for member in found]

    return _beginning(incomplete, _ask(context, asked))


def complete_services(context: typer.Context, incomplete: str) -> Candidates:
    """Services of the local stack that have a log, and the members of the fleet."""
    logs = Path(context.params.get("state") or "state") / "logs"
    return _beginning(incomplete, [(path.stem, "") for path in sorted(logs.glob("*.log"))]) or complete_members(
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


JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's id, the beginning of one, its name, or `last` for the newest job.",
        autocompletion=complete_jobs,
    ),
]
MemberName = Annotated[
    str,
    typer.Argument(
        metavar="MEMBER",
        help="A member's id, or the beginning of one.",
        show_default=False,
        autocompletion=complete_members,
    ),
]


def job_id(client: Client, given: str) -> str:
    """The id of the job that `given` names. Raises NotFound, and InvalidState if it could be several."""
    if re.fullmatch(r"job-[0-9a-f]{12}", given):
        return given
    if given == "last" and (newest := client.jobs(limit=1)):
        return newest[0].id
    jobs = client.jobs()[::-1]
    matching = [job.id for job in jobs if job.id.startswith((given, f"job-{given}")) or job.name == given]
    if not matching:
        known = ["last", *(job.name for job in jobs), *(job.id for job in jobs)] if jobs else []
        raise not_found("job", given, known, f"`millrace jobs` lists the jobs at {client.url}.")
    return _only(given, matching)


def member_id(client: Client, given: str) -> str:
    """The id of the member that `given` names. Raises NotFound, and InvalidState if it could be several."""
    fleet = client.fleet()
    known = [member.id for member in (*fleet.trainers, *fleet.replicas)]
    matching = [each for each in known if each.startswith(given)]
    if not matching:
        raise not_found("member", given, known, "`millrace fleet` lists the members.")
    return _only(given, matching)


def _only(given: str, matching: list[str]) -> str:
    if len(matching) > 1:
        raise InvalidState(f"{given!r} could be {', '.join(matching)}.", "give more of the id.")
    return matching[0]


def not_found(kind: str, given: str, known: Collection[str], listing: str) -> NotFound:
    """The error for a name that is not among those that are known; `listing` says what lists them."""
    near = closest(given, known)
    suggestion = f"did you mean `{near}`? " if near is not None else ""
    return NotFound(f"there is no {kind} {given!r}.", suggestion + listing)
