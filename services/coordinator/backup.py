"""Backup and restore of what the coordinators know: `python -m services.coordinator.backup save FILE`, `… load FILE`.

A backup is taken while everything runs. It holds jobs, ledgers, metrics, events, users: everything but the members of
the fleet, which register again. Models, data and checkpoints are files: copy them by other means to the same paths. The
checkpoints of a job with `schedule.checkpoint_store` are fetched when it goes on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from millrace.errors import InvalidState
from millrace.local.folders import new_private_folder
from millrace.service_process import ends_with_message
from services.coordinator.options import STATE, RedisOption, StateOption
from services.coordinator.redis_server import RedisServer, locked
from services.coordinator.stages.checkpoint_copies import Copies
from services.coordinator.store import Store
from services.coordinator.store.snapshot import Manifest, load, missing, read, save

ANSWER_S = 10.0
"""How long Redis may take to answer."""
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True)


@app.command("save")
def save_command(
    file: Annotated[Path, typer.Argument(help="The new file.")],
    redis_url: RedisOption = "",
    state_dir: StateOption = STATE,
) -> None:
    """Writes all of the coordinators' state at one moment to FILE. Jobs go on meanwhile."""

    async def work(store: Store) -> None:
        manifest = await save(store, file)
        typer.echo(f"{file}: {manifest.keys} keys.")
        _tell(manifest)

    _run(redis_url, state_dir.expanduser(), work, alone=False)


@app.command("load")
def load_command(
    file: Annotated[Path, typer.Argument(help="The file of a backup.")],
    redis_url: RedisOption = "",
    state_dir: StateOption = STATE,
    replace: Annotated[bool, typer.Option("--replace", help="Delete what Redis holds.")] = False,
    without_checkpoints: Annotated[
        bool, typer.Option("--without-checkpoints", help="Restore although checkpoints are missing on this host.")
    ] = False,
) -> None:
    """Puts a backup into a Redis on which no coordinator leads. Jobs go on when one is started."""

    async def work(store: Store) -> None:
        manifest, entries = read(file)
        if not without_checkpoints:
            _check_checkpoints(manifest)
        await load(store, entries, replace=replace)
        taken = datetime.fromtimestamp(manifest.taken_s, UTC).isoformat(timespec="seconds")
        typer.echo(f"{file}: {manifest.keys} keys of {taken}.")
        _tell(manifest)

    _run(redis_url, state_dir.expanduser(), work, alone=True)


def _check_checkpoints(manifest: Manifest) -> None:
    """Raises InvalidState if a job's checkpoint is neither at its path nor completely in the job's object store, and
    InvalidJob or CopyFailed if a store may not be used here or does not answer."""
    lost = []
    for job in missing(manifest):
        there = job.checkpoint_store and Copies(job.checkpoint_store, job.id).is_complete(job.checkpoint_step)
        if not there:
            stored = f", no copy in {job.checkpoint_store}" if job.checkpoint_store else ""
            lost.append(f"{job.checkpoint} ({job.id}{stored})")
    if lost:
        what = f"checkpoints that jobs continue from are missing on this host: {', '.join(lost)}."
        fix = "copy them to these paths; with --without-checkpoints other hosts have to have them."
        raise InvalidState(what, fix)


def _tell(manifest: Manifest) -> None:
    for job in manifest.jobs:
        then = f"continues from {job.checkpoint}" if job.checkpoint else "begins with the model"
        typer.echo(f"  {job.id} {job.name}: {job.state}, step {job.step}; {then}")


def _run(url: str, state: Path, work: Callable[[Store], Awaitable[None]], *, alone: bool) -> None:
    with ends_with_message("backup"):
        asyncio.run(_with_store(url, state, work, alone=alone))


async def _with_store(url: str, state: Path, work: Callable[[Store], Awaitable[None]], *, alone: bool) -> None:
    async with _redis(url, state, alone=alone) as found:
        store = Store(found)
        try:
            await store.connection.wait_for(ANSWER_S)
            await work(store)
        finally:
            await store.close()


@contextlib.asynccontextmanager
async def _redis(url: str, state: Path, *, alone: bool) -> AsyncIterator[str]:
    """The URL of Redis. The coordinator's own runs where a coordinator does, which `alone` excludes; it is started
    otherwise. Raises InvalidState if `state` is not a coordinator's and has to be (not `alone`)."""
    if url:
        yield url
        return
    own = RedisServer(state / "redis")
    if not alone and not (state / "redis").is_dir():
        what = f"--state-dir: {state} is not the folder of a coordinator."
        fix = "name its --state-dir, of `millrace up --state STATE` STATE/coordinator; or its Redis in REDIS_URL."
        raise InvalidState(what, fix)
    new_private_folder(state)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(state / "lock"))
        except InvalidState:
            if alone:
                raise
            yield own.url
            return
        await own.start()
        try:
            yield own.url
        finally:
            await own.stop()


if __name__ == "__main__":
    app()
