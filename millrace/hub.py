"""Models and data files by their names on the Hugging Face hub. Torch-free.

A job names a model `owner/name` or `owner/name@revision`, and a data file `hf://datasets/owner/name@revision/file`; the
revision may be left out. At submission each name is pinned to a commit, which is stored with the job, so that every
service reads the same files. Each host downloads them once, into the cache of `huggingface_hub`. The environment of a
service says which hub is asked and with which token: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import has_magic, iglob
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import structlog

from millrace.errors import InvalidJob, MillraceError, Mistake, Unavailable, refused
from millrace.spec.job import JobSpec

log = structlog.get_logger(__name__)

SCHEME = "hf://"
DATASETS = "datasets/"
ANSWER_S = 30.0
"""Longest time that the hub may take to begin an answer. `huggingface_hub` itself retries a download that stops."""
PROGRESS_S = 10.0
"""Time between two lines of the log about a download."""
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
WEIGHTS = ("*.safetensors",)
"""Patterns of the files of a model that are downloaded: without and with its weights. Files in folders are others'."""
MOST_FILES = 10_000
"""Files that one pattern may stand for: their names are stored with the job."""
NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9_-][\w.-]*/[A-Za-z0-9_-][\w.-]*)(?:@(?P<revision>[^/@]+))?(?:/(?P<file>.+))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL_FIX = "write owner/name, owner/name@revision, or the absolute path of a folder."
FILE_FIX = "write hf://datasets/owner/name/file, hf://datasets/owner/name@revision/file, or an absolute path."
CACHE_FIX = "free disk space there, or start the services with HF_HOME in another folder that they may write."
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Errors of a disk; those of a network are others."""


@dataclass(frozen=True)
class HubName:
    """A model, or a file of a data set, on the hub."""

    repository: str
    """`owner/name`."""
    revision: str | None
    """A branch, a tag or a commit; None for the default branch."""
    file: str | None = None
    """Path of the file in a data set; None for a model."""

    @classmethod
    def of_model(cls, text: str, field: str) -> Self | None:
        """The model that `text` names; None for a path. A relative path of a folder that exists is a path. Raises
        InvalidJob about `field` if it begins with hf:// and names no model."""
        found = NAME.fullmatch(text.removeprefix(SCHEME).removeprefix("models/" if text.startswith(SCHEME) else ""))
        if found is not None and found["file"] is None and (text.startswith(SCHEME) or not os.path.exists(text)):
            return cls(found["repository"], _revision(found))
        if text.startswith(SCHEME):
            raise refused(field, text, "is not the name of a model on the hub", MODEL_FIX)
        return None

    @classmethod
    def of_file(cls, text: str, field: str) -> Self | None:
        """The file of a data set that `text` names; None for a path. Raises InvalidJob about `field` if it begins
        with hf:// and names no file of a data set."""
        if not text.startswith(SCHEME):
            return None
        found = NAME.fullmatch(text.removeprefix(SCHEME + DATASETS))
        if found is None or found["file"] is None or not text.startswith(SCHEME + DATASETS):
            raise refused(field, text, "is not the name of a file in a data set on the hub", FILE_FIX)
        return cls(found["repository"], _revision(found), found["file"])

    @property
    def kind(self) -> str:
        return "model" if self.file is None else "dataset"

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return (
            f"{SCHEME}{self.repository}{revision}"
            if self.file is None
            else (f"{SCHEME}{DATASETS}{self.repository}{revision}/{self.file}")
        )


def pinned(spec: JobSpec) -> JobSpec:
    """The spec with the commit in every name, and with the files that match in the place of every pattern, as of now.
    Raises InvalidJob with every name that cannot be used, and Unavailable if the hub does not answer."""

    def pin(name: HubName | None, field: str, text: str) -> list[str]:
        if name is None:
            return matching(text, field) if field.endswith("files") else [text]
        pinned_name = _pinned(name, field)
        if name.file is None or not has_magic(name.file):
            return [str(pinned_name)]
        return _checked_matches(text, [str(each) for each in _matching(pinned_name, field)], field)

    return _changed(spec, pin)


def local(spec: JobSpec, *, weights: bool = False, data: bool = False, pool: str | None = None) -> JobSpec:
    """The spec with a path on this host for every name of a model, whose files are downloaded unless they are in the
    cache: config and tokenizer, and the weights if they are asked for; those of a pool's model only for that `pool`.
    With `data` the same for data files.

    Raises InvalidJob with every name that the hub refuses, and Unavailable if it does not answer.
    """

    def load(name: HubName | None, field: str, text: str) -> list[str]:
        if name is None or (name.file is not None and not data):
            return [text]
        elsewhere = field == "model.path" and spec.model.weights is not None
        whole = field in own or (weights and not elsewhere and not field.startswith("pools."))
        return [_downloaded(name, field, whole)]

    own = [f"pools.{number}.path" for number, each in enumerate(spec.pools) if each.name == pool]
    return _changed(spec, load)


def file_here(text: str, field: str) -> str:
    """The path on this host of a data file that is named by path or on the hub. Raises InvalidJob about `field`, and
    Unavailable if the hub does not answer."""
    name = HubName.of_file(text, field)
    if name is not None:
        return _downloaded(name, field, weights=False)
    if not os.path.isfile(text):
        raise refused(field, text, "there is no such file", FILE_FIX)
    return text


Change = Callable[[HubName | None, str, str], list[str]]
"""What a name in a field becomes: one name, or several files."""


def _changed(spec: JobSpec, become: Change) -> JobSpec:
    """The spec with the change of every field that may have a name. It is the same object if nothing changes. Raises
    InvalidJob with the mistakes of all fields."""
    mistakes: list[Mistake] = []

    def change_all(field: str, text: str) -> list[str]:
        try:
            name = HubName.of_file(text, field) if field.endswith("files") else HubName.of_model(text, field)
            return become(name, field, text)
        except InvalidJob as error:
            mistakes.extend(error.mistakes)
            return [text]

    def change(field: str, text: str) -> str:
        return change_all(field, text)[0]

    parts: dict[str, Any] = {"model": spec.model.model_copy(update={"path": change("model.path", spec.model.path)})}
    for part in ("data", "evaluation"):
        if (source := getattr(spec, part)) is not None:
            files = [found for file in source.files for found in change_all(f"{part}.files", file)]
            parts[part] = source.model_copy(update={"files": files})
    critic = spec.algorithm.critic
    if critic is not None and critic.path is not None:
        critic = critic.model_copy(update={"path": change("algorithm.critic.path", critic.path)})
        parts["algorithm"] = spec.algorithm.model_copy(update={"critic": critic})
    if spec.pools:
        parts["pools"] = [
            pool.model_copy(update={"path": change(f"pools.{number}.path", pool.path)})
            for number, pool in enumerate(spec.pools)
        ]
    if mistakes:
        raise InvalidJob.of(mistakes)
    changed = spec.model_copy(update=parts)
    return spec if changed == spec else changed


def _revision(found: re.Match[str]) -> str | None:
    return None if found["revision"] is None else unquote(found["revision"])


def _pinned(name: HubName, field: str) -> HubName:
    """The name with its commit. Raises InvalidJob, Unavailable. Where HF_HUB_OFFLINE is set the commit is that of the
    cache."""
    if name.revision is not None and COMMIT.fullmatch(name.revision):
        return name
    from huggingface_hub import HfApi, constants

    try:
        if constants.HF_HUB_OFFLINE:
            return replace(name, revision=_cached_commit(name))
        info = HfApi().repo_info(name.repository, repo_type=name.kind, revision=name.revision, timeout=ANSWER_S)
    except _failures() as error:
        raise _as_millrace_error(error, name, field) from error
    files = [found.rfilename for found in getattr(info, "siblings", None) or ()]
    if name.file is None and not any(fnmatch(file, pattern) for file in files for pattern in WEIGHTS):
        reason = f"the model has no weights in {' or '.join(WEIGHTS)}"
        raise refused(field, str(name), reason, "name a model whose weights are safetensors.")
    return replace(name, revision=info.sha)


def matching(path: str, field: str) -> list[str]:
    """The files that a path stands for: itself, or those that match it, in the order of their names, if it is an
    absolute pattern. Raises InvalidJob if none does, or too many."""
    if not has_magic(path) or not Path(path).is_absolute() or Path(path).exists():
        return [path]
    found = sorted(found for found in iglob(path, recursive=True) if Path(found).is_file())
    return _checked_matches(path, found, field)


def _checked_matches(pattern: str, found: list[str], field: str) -> list[str]:
    """`found`, if a job may have so many files. Raises InvalidJob."""
    if not found:
        raise refused(field, pattern, "no file matches this pattern", "correct it, or name the files.")
    if len(found) > MOST_FILES:
        reason = f"{len(found)} files match this pattern, and a job may have {MOST_FILES}"
        raise refused(field, pattern, reason, "join the files, or name fewer of them.")
    return found


def _matching(name: HubName, field: str) -> list[HubName]:
    """The files that match the pattern of a name with its commit, in the order of their names. Raises InvalidJob,
    Unavailable. Where HF_HUB_OFFLINE is set only the cache is looked at."""
    from huggingface_hub import HfApi, constants, snapshot_download

    pattern = name.file or ""
    try:
        if constants.HF_HUB_OFFLINE:
            folder = Path(
                snapshot_download(
                    name.repository,
                    repo_type=name.kind,
                    revision=name.revision,
                    allow_patterns=[pattern],
                    local_files_only=True,
                )
            )
            files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        else:
            files = HfApi().list_repo_files(name.repository, repo_type=name.kind, revision=name.revision)
    except _failures() as error:
        raise _as_millrace_error(error, name, field) from error
    return [replace(name, file=file) for file in sorted(files) if fnmatch(file, pattern)]


def _cached_commit(name: HubName) -> str:
    """Raises LocalEntryNotFoundError if the cache does not know the revision."""
    from huggingface_hub import snapshot_download

    kept = SMALL if name.file is None else (name.file,)
    folder = snapshot_download(
        name.repository,
        repo_type=name.kind,
        revision=name.revision,
        allow_patterns=list(kept),
        ignore_patterns=["*/*"] if name.file is None else None,
        local_files_only=True,
    )
    return os.path.basename(folder)


def _downloaded(name: HubName, field: str, weights: bool) -> str:
    """The folder of a model, or the path of a file. Raises InvalidJob, Unavailable."""
    from huggingface_hub import hf_hub_download, snapshot_download

    began = time.monotonic()
    try:
        if name.file is not None:
            path = hf_hub_download(
                name.repository, name.file, repo_type=name.kind, revision=name.revision, etag_timeout=ANSWER_S
            )
        else:
            path = snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=[*SMALL, *(WEIGHTS if weights else ())],
                ignore_patterns=["*/*"],
                etag_timeout=ANSWER_S,
                tqdm_class=_logged_progress(),
            )
    except _failures() as error:
        raise _as_millrace_error(error, name, field) from error
    log.info("in the cache", name=str(name), path=str(path), seconds=round(time.monotonic() - began, 1))
    return str(path)


def _logged_progress() -> type[Any]:
    """A progress bar that writes lines to the log, and not to the console."""
    from tqdm.auto import tqdm

    class LoggedProgress(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            named.pop("name", None)
            super().__init__(*arguments, **{**named, "mininterval": PROGRESS_S, "maxinterval": PROGRESS_S})

        def display(self, *arguments: Any, **named: Any) -> None:
            if self.n:
                log.info("downloading", what=self.desc, done=self.n, of=self.total)

        def close(self) -> None:
            self.disable = True

    return LoggedProgress


def _failures() -> tuple[type[Exception], ...]:
    """What `huggingface_hub` raises if it cannot give a file."""
    from huggingface_hub import errors

    transport = [kind for kind in errors.HfHubHTTPError.__mro__ if issubclass(kind, Exception)]
    names = ("HFValidationError", "EntryNotFoundError", "RevisionResolutionError")
    named = [kind for name in names if (kind := getattr(errors, name, None)) is not None]
    base = next((kind for kind in transport if kind.__module__.startswith(("httpx", "requests"))), OSError)
    return (OSError, base, *named)


def _as_millrace_error(error: Exception, name: HubName, field: str) -> MillraceError:
    """The error that a user reads for one of `huggingface_hub`."""
    from huggingface_hub import errors

    what = "model" if name.file is None else "data set"
    if isinstance(error, errors.GatedRepoError):
        fix = f"ask for access to {name.repository} on the hub, and start the services with HF_TOKEN of that user."
        return refused(field, str(name), f"the {what} is gated, and the hub does not give it to this service", fix)
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = "correct the name; start the services with HF_TOKEN for a private one; write a folder's absolute path."
        return refused(field, str(name), f"the hub has no such {what}, or it is private", fix)
    if isinstance(error, errors.RevisionNotFoundError):
        return refused(field, str(name), f"the {what} has no such revision", "name a branch, a tag or a commit.")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return refused(field, str(name), "the data set has no such file", "look at the hub's page of its files.")
    if isinstance(error, errors.HFValidationError):
        return refused(field, str(name), "is not a valid name on the hub", MODEL_FIX if what == "model" else FILE_FIX)
    if isinstance(error, OSError) and error.errno in DISK:
        from huggingface_hub import constants

        reason = f"it could not be written to the cache of this host, {constants.HF_HUB_CACHE}: {error.strerror}"
        return Unavailable(f"{field}: {name}: {reason}.", CACHE_FIX)
    reason = "the hub cannot be reached from this host (HF_ENDPOINT, HF_HUB_OFFLINE), and its cache does not have it"
    fix = f"let this host reach it, or fill its cache: hf download {name.repository}. A folder needs its absolute path."
    return Unavailable(f"{field}: {name}: {reason}.", fix)
