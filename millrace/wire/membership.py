"""Membership in the coordinator's fleet, for trainer and replicas alike: register, heartbeat, leave."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import structlog
import typer

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidRequest, InvalidState, MillraceError, NotFound, Unavailable, Untrusted
from millrace.ids import MemberId
from millrace.wire import last_words
from millrace.wire.channel import Peer

log = structlog.get_logger(__name__)
DRAINED_FILE = "MILLRACE_DRAINED_FILE"
"""Environment variable with the path of a file that a member makes when somebody drains it. The launcher reads it when
the member has ended, and does not start it again."""
LIFE_FILE = "MILLRACE_LIFE_FILE"
"""Environment variable with the path of a file that a member touches before each message to the coordinator, with
`time.monotonic()` as its time. The launcher sees by its age that the member stands still."""
NOTICE_FILE = "MILLRACE_NOTICE_FILE"
"""Environment variable with the path of a local file that an operator or an agent of the cloud makes if this host goes
away soon."""
PARTITION = "MILLRACE_PARTITION"
"""Environment variable with the partition of the fleet that this process, and those that it starts, work in."""
PartitionOption = Annotated[
    str, typer.Option(envvar=PARTITION, help="Partition of the fleet that it works in; empty: the default one.")
]
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 1.0


def work_in(partition: str) -> None:
    """Makes this process a member of the partition, or of that of MILLRACE_PARTITION if `partition` is empty."""
    if partition:
        os.environ[PARTITION] = partition


class Membership:
    """Keeps one process a member of the fleet.

    `registration` and `heartbeat` make each request from what the process is at that moment. `on_drain` is called with
    every heartbeat after somebody asked this member to drain. `patience_s`: how long the coordinator may be unreachable
    before the member gives up.
    """

    def __init__(
        self,
        coordinator: Peer,
        member_id: MemberId,
        registration: Callable[[], fleet_pb2.RegisterRequest],
        heartbeat: Callable[[], fleet_pb2.HeartbeatRequest],
        on_drain: Callable[[], None],
        patience_s: float = math.inf,
    ) -> None:
        self._coordinator = coordinator
        self._member_id = member_id
        self._registration = registration
        self._heartbeat = heartbeat
        self._on_drain = on_drain
        self._patience_s = patience_s
        self._heartbeat_s = 1.0
        self._registered = False
        self._leaving = False
        """Whether this member drains by its own decision, for example after SIGTERM."""

    def forgotten(self) -> None:
        """The coordinator does not know this member: before the next heartbeat it registers again, with the same id."""
        self._registered = False

    async def join(self) -> None:
        """Registers. Raises InvalidState if the coordinator refuses this member (another protocol version, a wrong
        token), Unavailable if it cannot be reached within the patience."""
        request = self._registration()
        if (before := last_words.previous()) is not None:
            request.previous.CopyFrom(before)
        request.partition = os.environ.get(PARTITION, "")
        reply = await self._patiently(FleetRpc.Register, request)
        last_words.joined(self._member_id)
        self._heartbeat_s = reply.heartbeat_s
        self._registered = True
        log.info("registered", coordinator=self._coordinator.address, epoch=reply.epoch)

    async def run(self) -> None:
        """Stays a member until cancelled. Raises as `join`."""
        while True:
            if not self._registered:
                await self.join()
            try:
                reply = await self._patiently(FleetRpc.Heartbeat, self._heartbeat())
            except NotFound:
                log.warning("the coordinator does not know this member; registering again")
                self._registered = False
                continue
            self._heartbeat_s = reply.heartbeat_s or self._heartbeat_s
            notice = heed_notice()
            if reply.drain or notice:
                if not self._leaving:
                    note_drained()
                self._on_drain()
            await asyncio.sleep(self._heartbeat_s)

    async def drain(self) -> bool:
        """Tells the coordinator, if it can be reached, that this member takes no more work. Returns whether it is about
        to ask for a checkpoint of what this trainer holds."""
        self._leaving = True
        answer = await self._try(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=self._member_id))
        return answer is not None and answer.save_follows

    async def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tells the coordinator, if it can be reached, that this member is gone; `failed`: because something in it
        failed."""
        request = fleet_pb2.LeaveRequest(member_id=self._member_id, reason=reason, failed=failed)
        await self._try(FleetRpc.Leave, request)

    async def _patiently(self, method: Unary[Request, Response], request: Request) -> Response:
        """One call, repeated while the coordinator does not answer it and the patience lasts."""
        since, pause_s = time.monotonic(), FIRST_RETRY_S
        while True:
            _show_life()
            try:
                return await self._coordinator.call(method, request)
            except (InvalidRequest, InvalidState, NotFound):
                raise
            except MillraceError as error:
                waited_s = time.monotonic() - since
                if waited_s > self._patience_s:
                    what = f"the coordinator has not answered for {waited_s:.0f} s: {error.what}"
                    fix = "start it, or give its address with --coordinator."
                    raise Unavailable(what, error.fix if isinstance(error, Untrusted) else fix) from error
                log.warning("waiting for the coordinator", method=method.name, error=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _try(self, method: Unary[Request, Response], request: Request) -> Response | None:
        try:
            return await self._coordinator.call(method, request)
        except MillraceError as error:
            log.info("the coordinator did not get the message", method=method.name, error=str(error))
            return None


def heed_notice() -> bool:
    """Whether this host goes away, by its notice. The launcher then does not start this process again."""
    if not (path := os.environ.get(NOTICE_FILE)) or not Path(path).exists():
        return False
    note_drained()
    return True


def note_drained() -> None:
    """Leaves a mark for the launcher not to start this process again."""
    if path := os.environ.get(DRAINED_FILE):
        Path(path).touch()


def _show_life() -> None:
    if path := os.environ.get(LIFE_FILE):
        with contextlib.suppress(OSError):  # without room for the file nobody waits for it
            Path(path).touch()
            os.utime(path, (time.monotonic(), time.monotonic()))
