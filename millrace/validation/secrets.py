"""Secrets by reference. A job spec or a setting names where a secret is, as `env:NAME` or `file:/path`. The process
that needs the value reads it, when it needs it; it is never stored, shown or logged.
"""

import fnmatch
import os
import re
import stat
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr

from millrace.errors import InvalidJob, Mistake, refused, wrong_value
from millrace.validation.places import lies_below, roots

SecretReference = Annotated[
    str, Field(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+)$", max_length=4096, examples=["env:NAME"])
]
"""`env:NAME`, a variable of the process that reads the secret, or `file:/path`, a file on its host."""
ALLOWED = "MILLRACE_JOB_SECRETS"
"""Environment variable with the references that jobs may make, separated by commas: `env:JUDGE_*,file:/run/secrets`.
Without it, those that are not of Millrace itself, and files in the folders of MILLRACE_ROOTS if that is set."""
OWN_VARIABLES = ("MILLRACE_*", "REDIS_URL")
OWN_FILES = ("MILLRACE_TOKEN_FILE", "MILLRACE_TLS_KEY")
"""Variables that name files with secrets of the services."""
LARGEST_FILE = 64 << 10
"""Bytes of a file with a secret."""
SENDABLE = re.compile(r"[!-~]+( [!-~]+)*")
"""Visible ASCII, as the value of a header may have it."""


def secret_of_job(reference: str, field: str) -> SecretStr:
    """The secret that a job names in `field`. Raises InvalidJob if the job may not name it, if there is none, and
    for one that has line breaks or characters beyond ASCII."""
    if mistake := not_allowed(reference, field):
        raise InvalidJob.of([mistake])
    return secret(reference, field)


def not_allowed(reference: str, field: str) -> Mistake | None:
    """Why a job may not name this secret in this process; None if it may."""
    kind, _, name = reference.partition(":")
    place = os.path.realpath(name) if kind == "file" else name
    patterns = [each.strip() for each in os.environ.get(ALLOWED, "").split(",") if each.strip()]
    if patterns:
        if any(_matches(kind, place, *pattern.partition(":")[::2]) for pattern in patterns):
            return None
        return wrong_value(field, reference, "jobs may not name this secret", f"have an operator add it to {ALLOWED}.")
    own = place in {os.path.realpath(os.environ[each]) for each in OWN_FILES if os.environ.get(each)}
    if own or (kind == "env" and any(fnmatch.fnmatchcase(name, each) for each in OWN_VARIABLES)):
        return wrong_value(field, reference, "is a secret of the services", "name a secret of the job.")
    if kind == "file" and (allowed := roots()) and not lies_below(place, allowed):
        fix = f"put the file below one of {', '.join(allowed)}, or have an operator add it to {ALLOWED}."
        return wrong_value(field, reference, "lies outside the folders that jobs may use", fix)
    return None


def secret(reference: str, field: str) -> SecretStr:
    """The secret, without white space around it. Raises InvalidJob, which never shows the value."""
    kind, _, name = reference.partition(":")
    if kind == "env":
        value = os.environ.get(name, "").strip()
        if not value:
            fix = "set it for every process that reads this field."
            raise refused(field, reference, "there is no such environment variable", fix)
    else:
        value = _content(Path(name), reference, field)
    if not SENDABLE.fullmatch(value):
        reason = "its value is empty, or has line breaks or characters that are not ASCII"
        raise refused(field, reference, reason, "store the secret as one line of ASCII.")
    return SecretStr(value)


def _content(path: Path, reference: str, field: str) -> str:
    fix = "put the secret into a file at this path that the service may read."
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refused(field, reference, "is not a regular file", fix)
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise refused(field, reference, f"cannot be read: {error.strerror}", fix) from error
    if len(content) > LARGEST_FILE:
        raise refused(field, reference, f"has more than {LARGEST_FILE} bytes", fix)
    return content.decode(errors="replace").strip()


def _matches(kind: str, place: str, wanted_kind: str, pattern: str) -> bool:
    if kind != wanted_kind:
        return False
    return fnmatch.fnmatchcase(place, pattern) if kind == "env" else lies_below(place, [os.path.realpath(pattern)])
