"""Being a member of the fleet: registering, heartbeats, leaving."""

import asyncio
import socket
import time

import structlog

import millrace
from millrace.errors import MillraceError, NotFound, Unavailable
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.method import Request, Response, Unary
from millrace.wire.methods import FleetRpc
from millrace.wire.v1 import fleet_pb2
from services.rollout.replica import Replica

log = structlog.get_logger(__name__)
RETRY_S = 1.0


class Membership:
    """`patience_s`: for how long the coordinator may be out of reach before this replica gives up."""

    def __init__(self, coordinator: Peer, replica: Replica, address: str, patience_s: float) -> None:
        self._coordinator = coordinator
        self._replica = replica
        self._address = address
        self._patience_s = patience_s
        self._heartbeat_s = 1.0
        self._forgotten = asyncio.Event()

    def forgotten(self) -> None:
        """The coordinator does not know this member: the next heartbeat registers it again under the same id."""
        self._forgotten.set()

    async def join(self) -> None:
        """Registers. Raises InvalidState where the coordinator refuses this release, Unavailable where it cannot be
        reached within the patience."""
        replica = self._replica
        engine = replica.engine
        request = fleet_pb2.RegisterRequest(
            member_id=replica.member_id,
            kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
            address=self._address,
            protocol_version=PROTOCOL_VERSION,
            release=millrace.__version__,
            engine=replica.engine_name,
            engine_release=replica.engine_release,
            world_size=(engine.world_size if engine else 0) or 1,
            host=socket.gethostname(),
            device=engine.device if engine else "",
        )
        reply = await self._patiently(FleetRpc.Register, request)
        self._heartbeat_s = reply.heartbeat_s
        self._forgotten.clear()
        log.info("registered", coordinator=self._coordinator.address, epoch=reply.epoch, address=self._address)

    async def run(self) -> None:
        """Heartbeats, without end. Raises as `join` does."""
        while True:
            if self._forgotten.is_set():
                await self.join()
            try:
                reply = await self._patiently(FleetRpc.Heartbeat, self._heartbeat())
            except NotFound:
                log.info("the coordinator does not know this replica; registering again")
                self._forgotten.set()
                continue
            if reply.drain:
                self._replica.drain()
            await asyncio.sleep(self._heartbeat_s)

    async def drain(self) -> None:
        """Tells the coordinator that no more leases are wanted."""
        await self._try(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=self._replica.member_id))

    async def leave(self, reason: str) -> None:
        await self._try(FleetRpc.Leave, fleet_pb2.LeaveRequest(member_id=self._replica.member_id, reason=reason))

    def _heartbeat(self) -> fleet_pb2.HeartbeatRequest:
        replica = self._replica
        load, free = replica.load()
        return fleet_pb2.HeartbeatRequest(
            member_id=replica.member_id,
            running=load.running,
            waiting=load.waiting,
            free=free,
            version=-1 if replica.version is None else replica.version,
            tokens=replica.leases.generated_tokens,
        )

    async def _patiently(self, method: Unary[Request, Response], request: Request) -> Response:
        """One call, repeated while the coordinator cannot be reached and the patience lasts."""
        since = time.monotonic()
        while True:
            try:
                return await self._coordinator.call(method, request)
            except Unavailable as error:
                waited = time.monotonic() - since
                if waited > self._patience_s:
                    what = f"the coordinator was out of reach for {waited:.0f} s: {error.what}"
                    raise Unavailable(what, "start it, or give its address with --coordinator.") from error
                log.info("waiting for the coordinator", error=error.what)
            await asyncio.sleep(RETRY_S)

    async def _try(self, method: Unary[Request, Response], request: Request) -> None:
        try:
            await self._coordinator.call(method, request)
        except MillraceError as error:
            log.info("the coordinator was not told", method=method.name, error=str(error))
