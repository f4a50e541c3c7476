"""Jobs and members as people name them on the command line: by id, the beginning of one, or a job's name."""

import re
from collections.abc import Collection
from typing import Annotated

import typer

from millrace.cli import completion
from millrace.client import Client
from millrace.errors import InvalidState, NotFound
from millrace.validation.names import closest

JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's id, the beginning of one, its name, or `last` for the newest job.",
        autocompletion=completion.jobs,
    ),
]
MemberName = Annotated[
    str,
    typer.Argument(
        metavar="MEMBER",
        help="A member's id, or the beginning of one.",
        show_default=False,
        autocompletion=completion.members,
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
