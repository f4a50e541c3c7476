"""A member against a coordinator's Fleet service, over a real socket."""

import asyncio
from pathlib import Path

import pytest

from millrace.contracts.v1 import fleet_pb2, fleet_pb2_grpc
from millrace.errors import InvalidState, MillraceError, NotFound, Unavailable
from millrace.ids import MemberId
from millrace.wire.channel import Peer
from millrace.wire.membership import DRAINED_FILE, NOTICE_FILE, Membership
from millrace.wire.server import Server

MEMBER = MemberId("rollout-1")


class Fleet(fleet_pb2_grpc.FleetServicer):
    """Answers each Register and each Heartbeat with the next of what it was given, and counts them."""

    def __init__(self, registers: list[Exception | None], heartbeats: list[Exception | None]) -> None:
        self.registers, self.heartbeats = registers, heartbeats
        self.registered = self.beats = 0
        self.draining = False
        self.heartbeat_s = 0.0
        self.left = ""
        self.quiet = asyncio.Event()
        """Set with the first heartbeat for which nothing was given."""

    async def Register(self, request, context):
        assert request.member_id == MEMBER
        self.registered += 1
        if self.registers and (error := self.registers.pop(0)) is not None:
            raise error
        return fleet_pb2.RegisterResponse(epoch=1, heartbeat_s=0.01)

    async def Heartbeat(self, request, context):
        self.beats += 1
        if not self.heartbeats:
            self.quiet.set()
        elif (error := self.heartbeats.pop(0)) is not None:
            raise error
        return fleet_pb2.HeartbeatResponse(epoch=1, drain=self.draining, heartbeat_s=self.heartbeat_s)

    async def Leave(self, request, context):
        self.left = request.reason
        return fleet_pb2.LeaveResponse()


def member(registers=(), heartbeats=(), patience_s=5.0):
    """A fleet, its member, and the event that the member sets where it is to drain."""
    fleet, drained = Fleet(list(registers), list(heartbeats)), asyncio.Event()
    services = {"millrace.v1.Fleet": lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)}
    server = Server(services, "127.0.0.1", 0)
    membership = Membership(
        Peer(f"127.0.0.1:{server.port}"),
        MEMBER,
        lambda: fleet_pb2.RegisterRequest(member_id=MEMBER),
        lambda: fleet_pb2.HeartbeatRequest(member_id=MEMBER),
        drained.set,
        patience_s,
    )
    return fleet, server, membership, drained


def test_a_member_registers_again_where_it_was_forgotten_and_leaves() -> None:
    async def scenario() -> None:
        fleet, server, membership, _ = member(heartbeats=[None, NotFound("rollout-1 is no member.")])
        await server.start()
        keeping = asyncio.create_task(membership.run())
        await fleet.quiet.wait()
        assert (fleet.registered, fleet.beats) == (2, 3)
        fleet.quiet.clear()
        membership.forgotten()
        while fleet.registered < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        keeping.cancel()
        await membership.leave("it was told to")
        assert fleet.left == "it was told to"
        await server.stop(0.1)

    asyncio.run(scenario())


def test_a_member_that_is_to_drain_is_told() -> None:
    async def scenario() -> None:
        fleet, server, membership, drained = member()
        fleet.draining = True
        await server.start()
        keeping = asyncio.create_task(membership.run())
        await drained.wait()
        keeping.cancel()
        await server.stop(0.1)

    asyncio.run(scenario())


def test_a_member_whose_host_goes_away_drains_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice, noted = tmp_path / "notice", tmp_path / "drained"
    monkeypatch.setenv(NOTICE_FILE, str(notice))
    monkeypatch.setenv(DRAINED_FILE, str(noted))

    async def scenario() -> None:
        fleet, server, membership, drained = member()
        await server.start()
        keeping = asyncio.create_task(membership.run())
        await fleet.quiet.wait()
        fleet.quiet.clear()
        await fleet.quiet.wait()
        assert not drained.is_set() and not noted.exists()
        notice.touch()
        await asyncio.wait_for(drained.wait(), 20)
        keeping.cancel()
        await server.stop(0.1)

    asyncio.run(scenario())
    assert noted.exists()


def test_a_member_sends_heartbeats_as_rarely_as_it_was_told_last() -> None:
    async def scenario() -> None:
        fleet, server, membership, _ = member()
        fleet.heartbeat_s = 3600.0
        await server.start()
        keeping = asyncio.create_task(membership.run())
        await fleet.quiet.wait()
        fleet.quiet.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.quiet.wait(), 0.3)  # registered, it would send one each 10 ms
        keeping.cancel()
        await server.stop(0.1)

    asyncio.run(scenario())


def test_failures_of_the_coordinator_are_waited_for() -> None:
    """Whatever it fails with, unless it refuses the member."""
    broken = [MillraceError("a bug."), Unavailable("Redis is down.")]

    async def scenario() -> None:
        fleet, server, membership, _ = member(registers=list(broken), heartbeats=list(broken))
        await server.start()
        keeping = asyncio.create_task(membership.run())
        await fleet.quiet.wait()
        assert (fleet.registered, fleet.beats) == (3, 3)
        keeping.cancel()
        await server.stop(0.1)

    asyncio.run(scenario())


def test_a_refused_member_gives_up_at_once() -> None:
    async def scenario() -> None:
        fleet, server, membership, _ = member(registers=[InvalidState("another protocol version.")])
        await server.start()
        with pytest.raises(InvalidState, match="another protocol version"):
            await membership.run()
        assert fleet.registered == 1
        await server.stop(0.1)

    asyncio.run(scenario())


def test_a_member_without_a_coordinator_gives_up_after_its_patience() -> None:
    async def scenario() -> None:
        _, server, membership, _ = member(patience_s=0.3)
        await server.stop(0.1)
        with pytest.raises(Unavailable, match="has not answered"):
            await membership.run()

    asyncio.run(scenario())
