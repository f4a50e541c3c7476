"""All of the coordinators' keys at one moment, as a file: `manifest.json` and `keys` in a zip archive.

`keys` has one entry after the other: bytes of the key and of the value, milliseconds until the key expires, key, value
as DUMP has it.
"""

import json
import os
import struct
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from millrace import __version__
from millrace.errors import InvalidState, Unavailable
from millrace.rest import JobState
from services.coordinator.state.job import ACTIVE
from services.coordinator.store import Store
from services.coordinator.store.connection import LARGE_S
from services.coordinator.store.leadership import LEADER

FORMAT = 1
"""Format of the file and of the keys. It is raised when an earlier release could not read them."""
HEAD = struct.Struct("<IQq")
LARGEST_BYTES = 2 << 30
"""What a Redis may hold for a backup by one script, which everything else waits for."""
MOST_JOBS = 10_000
Entry = tuple[bytes, int, bytes]
"""Key, milliseconds until it expires (-1: never), value."""


@dataclass(frozen=True)
class NeededJob:
    """A job that has not ended, and what it continues from besides Redis."""

    id: str
    name: str
    state: str
    step: int
    output: str
    checkpoint: str
    """Folder; empty: it continues from the model."""
    checkpoint_step: int
    checkpoint_store: str = ""
    """URL of the object store that has copies of its checkpoints; empty: none."""


@dataclass(frozen=True)
class Manifest:
    format: int
    release: str
    taken_s: float
    """Unix time."""
    keys: int
    jobs: list[NeededJob]


async def save(store: Store, path: Path) -> Manifest:
    """Writes a snapshot to a new file that only its user reads. Raises StoreDown, Unavailable, InvalidState."""
    usage = await store.connection.usage()
    if usage is not None and usage.memory_bytes > LARGEST_BYTES:
        what = (
            f"Redis at {store.connection.name} holds {usage.memory_bytes >> 20} MiB, more than a backup takes at once."
        )
        raise Unavailable(what, "copy its data with `redis-cli --rdb FILE`, which reads a snapshot of the server.")
    needed = await _needed(store)
    found: list[Any] = await store.connection.run("dump", [], large=True)
    if not found:
        what = f"there is nothing to save: no coordinator has written to Redis at {store.connection.name}."
        raise InvalidState(what, "name the Redis of the coordinator in REDIS_URL, or its folder in --state-dir.")
    entries = [(bytes(found[i]), int(found[i + 1]), bytes(found[i + 2])) for i in range(0, len(found), 3)]
    manifest = Manifest(FORMAT, __version__, time.time(), len(entries), needed)
    scratch = path.with_name(f"{path.name}.part")
    try:
        with os.fdopen(os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                archive.writestr("manifest.json", json.dumps(asdict(manifest), indent=1))
                with archive.open("keys", "w", force_zip64=True) as keys:
                    for key, expires_ms, value in entries:
                        keys.write(HEAD.pack(len(key), len(value), expires_ms) + key + value)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror}.", "name another file.") from error
    return manifest


async def _needed(store: Store) -> list[NeededJob]:
    jobs = []
    for state in (*ACTIVE, JobState.QUEUED):
        for job_id in await store.index.in_state(state, MOST_JOBS):
            job = await store.jobs.get(job_id)
            spec = json.loads(job.spec_json)
            output, url = str(spec["output"]), (spec.get("schedule") or {}).get("checkpoint_store") or ""
            kept = await store.records(job_id).checkpoints()
            step = max(kept, default=0)
            path = str(kept[step]["path"]) if kept else ""
            jobs.append(NeededJob(job.id, job.name, job.state, job.step, output, path, step, url))
    return jobs


def read(path: Path) -> tuple[Manifest, list[Entry]]:
    """The snapshot of a file. Raises InvalidState for a file that is none, is damaged, or is of a later release."""
    try:
        with zipfile.ZipFile(path) as archive:
            tree = json.loads(archive.read("manifest.json"))
            if tree["format"] != FORMAT:
                written = f"{tree['format']}, of release {tree.get('release')}"
                what = f"{path} has the format {written}; this release reads {FORMAT}."
                raise InvalidState(what, "restore it with that release, then upgrade.")
            jobs = [NeededJob(**job) for job in tree.pop("jobs")]
            manifest, entries = Manifest(**tree, jobs=jobs), list(_entries(archive.read("keys")))
    except OSError as error:
        raise InvalidState(f"{path} cannot be read: {error.strerror}.", "name the file of a backup.") from error
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, struct.error) as error:
        raise InvalidState(f"{path} is no backup, or is damaged: {error}.", "name the file of a backup.") from error
    if len(entries) != manifest.keys:
        what = f"{path} is damaged: it holds {len(entries)} of {manifest.keys} keys."
        raise InvalidState(what, "take another backup.")
    return manifest, entries


def _entries(data: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(data):
        key_bytes, value_bytes, expires_ms = HEAD.unpack_from(data, at)
        at += HEAD.size
        end = at + key_bytes + value_bytes
        if end > len(data):
            raise ValueError("an entry is cut off")
        yield data[at : at + key_bytes], expires_ms, data[at + key_bytes : end]
        at = end


async def load(store: Store, entries: list[Entry], *, replace: bool) -> None:
    """Puts the keys of a snapshot into Redis, all at once. `replace`: in place of what is there. Raises StoreDown, and
    InvalidState if a coordinator leads, Redis holds jobs already, or is older than the one of the snapshot."""
    if await store.connection.do("EXISTS", LEADER):
        what = f"a coordinator leads on Redis at {store.connection.name}."
        raise InvalidState(what, "stop all coordinators first; one that was killed loses its lease within seconds.")
    there = [bytes(key) for key in (await store.connection.run("dump", [], large=True))[::3]]
    if any(key.startswith(b"millrace:job") for key in there) and not replace:
        what = f"Redis at {store.connection.name} holds jobs already."
        raise InvalidState(what, "name an empty one, or give --replace to delete what it holds.")
    commands: list[tuple[Any, ...]] = [("DEL", key) for key in (*there, b"millrace:fleet:members")]
    commands += [("RESTORE", key, max(0, expires_ms), value, "REPLACE") for key, expires_ms, value in entries]
    try:
        await store.connection.together(*commands, within_s=LARGE_S)
    except ResponseError as error:
        fix = "restore into a Redis that is as new as the one that the backup was taken of."
        raise InvalidState(f"Redis at {store.connection.name} does not take the backup: {error}.", fix) from error


def missing(manifest: Manifest) -> list[NeededJob]:
    """The jobs whose checkpoint is not at its path on this host."""
    return [job for job in manifest.jobs if job.checkpoint and not Path(job.checkpoint).is_dir()]
