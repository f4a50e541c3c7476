"""Starts a rollout replica: `python -m services.rollout --coordinator host:7600 --engine vllm --port 0`."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from typing import Annotated, NoReturn

import structlog
import typer

from millrace.engines import ENGINE_NAMES
from millrace.errors import MillraceError
from millrace.ids import MemberId, new_member_id
from millrace.telemetry import logs
from millrace.version import VersionOption
from millrace.wire.channel import Peer
from millrace.wire.membership import Membership
from millrace.wire.server import Server, host_address
from services.rollout.engines import probe
from services.rollout.lifeline import kill_descendants
from services.rollout.replica import Replica
from services.rollout.server import servicers
from services.rollout.work.leases import Leases

log = structlog.get_logger(__name__)
app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Options:
    coordinator: str
    engine: str
    engine_release: str
    host: str
    """By which others reach this replica."""
    port: int
    patience_s: float
    drain_s: float


@app.command()
def main(
    coordinator: Annotated[
        str, typer.Option(envvar="MILLRACE_COORDINATOR", help="host:port of the coordinator's gRPC server.")
    ],
    engine: Annotated[str, typer.Option(envvar="MILLRACE_ENGINE", help=f"One of {', '.join(ENGINE_NAMES)}.")] = "vllm",
    host: Annotated[
        str, typer.Option(envvar="MILLRACE_HOST", help="Address at which others reach this host; empty: detected.")
    ] = "",
    port: Annotated[
        int, typer.Option(envvar="MILLRACE_PORT", help="Port of the replica's gRPC server; 0: a free port.")
    ] = 0,
    patience_s: Annotated[
        float, typer.Option(envvar="MILLRACE_PATIENCE_S", help="Seconds without a coordinator until the replica ends.")
    ] = 900.0,
    drain_s: Annotated[
        float, typer.Option(envvar="MILLRACE_DRAIN_S", help="Seconds to finish its leases when it is stopped.")
    ] = 600.0,
    version: VersionOption = False,
) -> None:
    """Serves one engine to the fleet until it is told to stop."""
    if host:
        os.environ["MILLRACE_HOST"] = host  # copies to siblings are told it too
    member_id = new_member_id("rollout")
    try:
        logs.configure("rollout", member_id)
        found = probe(engine)
        if not found.ok:
            raise MillraceError(f"engine {engine} cannot run here: {found.why}")
        options = Options(coordinator, engine, found.release, host_address(), port, patience_s, drain_s)
    except MillraceError as error:
        print(f"rollout: {error}", file=sys.stderr)
        _end(1)
    asyncio.run(_process(member_id, options))


async def _process(member_id: MemberId, options: Options) -> NoReturn:
    """Serves, and ends the process from within the event loop: asyncio.run would wait for every thread that it lent,
    for one that never answers too."""
    status = 1
    try:
        status = await _serve(member_id, options)
    except MillraceError as error:
        print(f"rollout: {error}", file=sys.stderr)
    except Exception as error:
        log.error("the replica failed", exc_info=error)
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    try:
        kill_descendants()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Engine libraries leave threads and destructors behind that have nothing to say any more.
        os._exit(status)


async def _serve(member_id: MemberId, options: Options) -> int:
    """Returns the exit status. Raises MillraceError where the replica cannot be a member."""
    coordinator = Peer(options.coordinator)
    leases = Leases(coordinator, member_id)
    replica = Replica(member_id, options.engine, options.engine_release, leases)
    bind = options.host if options.host in ("127.0.0.1", "localhost", "::1") else "0.0.0.0"
    server = Server(servicers(replica), bind, options.port)
    membership = replica.membership(coordinator, f"{options.host}:{server.port}", options.patience_s)
    leases.on_forgotten, leases.on_death = membership.forgotten, replica.died_of
    stops = _signals()
    await server.start()
    beating = asyncio.create_task(membership.run())
    pulling = asyncio.create_task(leases.run())
    try:
        reason = await _until_ending(replica, stops, beating, pulling)
        if reason == "stopped":
            await drain(replica, membership, stops, options.drain_s)
    finally:
        pulling.cancel()
        await server.healthy(False)
        await replica.close()
        beating.cancel()
    await membership.leave(replica.failure or "it was told to stop")
    await server.stop(1.0)
    await coordinator.close()
    return 1 if replica.died.is_set() else 0


def _signals() -> asyncio.Queue[int]:
    """SIGTERM and SIGINT as they come."""
    stops: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stops.put_nowait, number)
    return stops


async def _until_ending(
    replica: Replica, stops: asyncio.Queue[int], beating: asyncio.Task[None], pulling: asyncio.Task[None]
) -> str:
    """Waits for the first reason to end: `stopped` (a signal or a drain) or `died`. Raises what ended a loop."""
    stopped = asyncio.create_task(stops.get())
    drained = asyncio.create_task(replica.draining.wait())
    died = asyncio.create_task(replica.died.wait())
    await asyncio.wait({stopped, drained, died, beating, pulling}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopped, drained, died):
        task.cancel()
    for loop in (beating, pulling):
        if loop.done():
            loop.result()
    return "died" if replica.died.is_set() else "stopped"


async def drain(replica: Replica, membership: Membership, stops: asyncio.Queue[int], drain_s: float) -> None:
    """Finishes what is in work; a second signal or the deadline ends the wait, and the rest is given back."""
    replica.drain()
    await membership.drain()
    finished = asyncio.create_task(replica.leases.finish())
    again = asyncio.create_task(stops.get())
    died = asyncio.create_task(replica.died.wait())
    await asyncio.wait({finished, again, died}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (finished, again, died):
        task.cancel()


if __name__ == "__main__":
    app()
