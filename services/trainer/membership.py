"""The trainer as a member of the coordinator's fleet: register, heartbeat, register anew when forgotten, leave."""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from millrace.errors import InvalidState, MillraceError, NotFound
from millrace.wire.channel import Peer
from millrace.wire.methods import FleetRpc
from millrace.wire.v1 import fleet_pb2

log = structlog.get_logger(__name__)

LONGEST_WAIT_S = 5.0


class Membership:
    """`beat` makes each heartbeat; `on_drain` is called once the coordinator wants this member to drain."""

    def __init__(
        self,
        coordinator: Peer,
        registration: fleet_pb2.RegisterRequest,
        beat: Callable[[], fleet_pb2.HeartbeatRequest],
        on_drain: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._registration = registration
        self._beat = beat
        self._on_drain = on_drain

    async def keep(self) -> None:
        """Stays a member until cancelled; a coordinator that is away is waited for. Raises InvalidState where it
        refuses this member: another protocol version, another token."""
        while True:
            terms = await self._register()
            log.info("in the fleet", coordinator=self._coordinator.address, epoch=terms.epoch)
            await self._heartbeats(terms)

    async def leave(self, reason: str) -> None:
        """Tells the coordinator, if it can be reached."""
        request = fleet_pb2.LeaveRequest(member_id=self._registration.member_id, reason=reason)
        with contextlib.suppress(MillraceError):
            await self._coordinator.call(FleetRpc.Leave, request)

    async def _register(self) -> fleet_pb2.RegisterResponse:
        wait_s = 0.2
        while True:
            try:
                return await self._coordinator.call(FleetRpc.Register, self._registration)
            except InvalidState:
                raise
            except MillraceError as error:
                log.warning("not in the fleet yet", coordinator=self._coordinator.address, error=str(error))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _heartbeats(self, terms: fleet_pb2.RegisterResponse) -> None:
        """Returns when the coordinator has forgotten this member."""
        while True:
            await asyncio.sleep(terms.heartbeat_s)
            try:
                reply = await self._coordinator.call(FleetRpc.Heartbeat, self._beat())
            except NotFound:
                log.warning("the coordinator forgot this member; registering anew")
                return
            except MillraceError as error:
                log.warning("heartbeat failed", error=str(error))
                continue
            if reply.drain:
                self._on_drain()
