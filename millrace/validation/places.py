"""Where a job may read and write, as an operator allows it: folders of a host, and object stores, as URLs that fsspec
takes."""

import importlib
import os
import posixpath
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from millrace.errors import InvalidJob, MillraceError, refused

ROOTS = "MILLRACE_ROOTS"
"""Environment variable with the folders that jobs may use, separated as in PATH. Not set: jobs may use any folder."""


def roots() -> list[str]:
    """The folders that jobs may use, without symbolic links; none if the variable is not set."""
    return [os.path.realpath(root) for root in os.environ.get(ROOTS, "").split(os.pathsep) if root]


def lies_below(place: str, folders: Iterable[str]) -> bool:
    """Whether an absolute path lies in one of the `folders`. None of them has symbolic links."""
    return any(os.path.commonpath((place, folder)) == folder for folder in folders)


ALLOWED = "MILLRACE_CHECKPOINT_STORES"
"""Environment variable of the coordinator with the URLs below which jobs may copy their checkpoints, separated by
commas: `s3://checkpoints/team,file:///mnt/archive`. Without it they may name none: the coordinator's own rights are
used."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "file": "fsspec"}
"""By protocol the package that speaks it."""
EXTRA = "object-storage"
FIELD = "schedule.checkpoint_store"


def check_store(url: str, field: str = FIELD) -> None:
    """Raises InvalidJob if a job may not use the URL here, or a package is missing."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme not in PACKAGES or "::" in url or parts.query or parts.fragment or parts.username:
        reason = "is no URL of an object store"
        raise refused(field, url, reason, f"write PROTOCOL://BUCKET/PATH with one of {', '.join(PACKAGES)}.")
    if posixpath.normpath(path) != path.rstrip("/") and path.strip("/"):
        raise refused(field, url, "has a path that is not plain", "leave out empty parts, `.` and `..`.")
    allowed = [each.strip().rstrip("/") for each in os.environ.get(ALLOWED, "").split(",") if each.strip()]
    if not any(f"{url.rstrip('/')}/".startswith(f"{each}/") for each in allowed):
        fix = f"name one below {' or '.join(allowed)}" if allowed else f"have an operator name some in {ALLOWED}"
        raise refused(field, url, "lies outside the stores that jobs may use", f"{fix}.")
    if mistake := missing(parts.scheme):
        raise refused(field, url, str(mistake.what), mistake.fix)


def missing(protocol: str) -> MillraceError | None:
    """The error that names the package which the protocol lacks here; None if it has all."""
    for package in ("fsspec", PACKAGES[protocol]):
        try:
            importlib.import_module(package)
        except ImportError:
            extra = f", or `millrace[{EXTRA}]`" if package in ("fsspec", "s3fs") else ""
            return InvalidJob(f"needs the package {package}", f"install {package} on the coordinator's host{extra}.")
    return None
