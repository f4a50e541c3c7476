"""A coordinator at several addresses, and calls of a coordinator that does not lead any more."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2, fleet_pb2_grpc
from millrace.errors import Fenced, InvalidRequest, InvalidState, Unavailable
from millrace.wire.channel import Peer, addresses
from millrace.wire.deadlines import DEADLINES_S
from millrace.wire.server import Server

BEAT = fleet_pb2.HeartbeatRequest(member_id="rollout-1")
DEADLINES = {**DEADLINES_S, FleetRpc.Heartbeat.key: 0.5, FleetRpc.Register.key: 60.0}
REGISTER = fleet_pb2.RegisterRequest(
    member_id="rollout-1", kind=fleet_pb2.MEMBER_KIND_ROLLOUT, address="127.0.0.1:1", protocol_version=1
)


class Fleet(fleet_pb2_grpc.FleetServicer):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.stands_still = False
        self.asked = asyncio.Event()

    async def Heartbeat(self, request: Any, context: Any) -> fleet_pb2.HeartbeatResponse:
        if self.stands_still:
            await asyncio.Event().wait()
        return fleet_pb2.HeartbeatResponse(epoch=self.epoch)

    async def Register(self, request: Any, context: Any) -> fleet_pb2.RegisterResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


def played(use: Callable[[list[Fleet], list[Server]], Awaitable[None]]) -> None:
    """Two servers answer with the epochs 1 and 2, and both say that they lead."""

    async def run() -> None:
        fleets = [Fleet(1), Fleet(2)]
        servers = []
        for fleet in fleets:
            add = {"millrace.v1.Fleet": lambda server, f=fleet: fleet_pb2_grpc.add_FleetServicer_to_server(f, server)}
            servers.append(Server(add, "127.0.0.1", 0))
            await servers[-1].start()
        try:
            async with asyncio.timeout(60):
                await use(fleets, servers)
        finally:
            for server in servers:
                await server.stop(0)

    asyncio.run(run())


def of_both(servers: list[Server]) -> Peer:
    return Peer(",".join(f"127.0.0.1:{server.port}" for server in servers), DEADLINES)


def test_calls_go_to_the_address_that_leads_after_the_other_has_ended() -> None:
    async def use(fleets: list[Fleet], servers: list[Server]) -> None:
        peer = of_both(servers)
        assert (await peer.call(FleetRpc.Heartbeat, BEAT)).epoch == 1
        await servers[0].stop(0)
        assert (await peer.call(FleetRpc.Heartbeat, BEAT, attempts=20)).epoch == 2
        await peer.close()

    played(use)


def test_a_call_to_one_that_stands_still_ends_when_another_leads() -> None:
    async def use(fleets: list[Fleet], servers: list[Server]) -> None:
        peer = of_both(servers)
        waiting = asyncio.create_task(peer.call(FleetRpc.Register, REGISTER))
        await fleets[0].asked.wait()
        fleets[0].stands_still = True
        await servers[1].healthy(False)
        with pytest.raises(Unavailable, match="did not answer within"):
            await peer.call(FleetRpc.Heartbeat, BEAT)
        assert not waiting.done() and peer.address.endswith(str(servers[0].port)), "nobody else leads"
        await servers[1].healthy(True)
        with pytest.raises(Unavailable, match="did not answer within"):
            await peer.call(FleetRpc.Heartbeat, BEAT)
        with pytest.raises(Unavailable, match="does not lead any more"):
            await waiting
        assert (await peer.call(FleetRpc.Heartbeat, BEAT)).epoch == 2
        await peer.close()

    played(use)


def test_a_cancelled_caller_is_cancelled_whoever_leads() -> None:
    async def use(fleets: list[Fleet], servers: list[Server]) -> None:
        peer = of_both(servers)
        waiting = asyncio.create_task(peer.call(FleetRpc.Register, REGISTER))
        await fleets[0].asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await peer.close()

    played(use)


def test_a_member_takes_no_call_of_a_leader_before_the_newest() -> None:
    async def use(fleets: list[Fleet], servers: list[Server]) -> None:
        address = f"127.0.0.1:{servers[0].port}"
        old, new, member = Peer(address, leader=7), Peer(address, leader=8), Peer(address)
        for peer in (old, new, new, member):
            await peer.call(FleetRpc.Heartbeat, BEAT)
        with pytest.raises(Fenced, match="epoch 7 called, and another one leads with the epoch 8"):
            await old.call(FleetRpc.Heartbeat, BEAT)
        wrong = Peer(address, leader=-1)
        with pytest.raises(InvalidRequest, match="millrace-leader: -1: is not an epoch"):
            await wrong.call(FleetRpc.Heartbeat, BEAT)
        for peer in (old, new, member, wrong):
            await peer.close()

    played(use)


@pytest.mark.parametrize(
    "given,reason",
    [
        ("a:7600,b", "b is not host:port"),
        ("a:7600,", "an empty address is not host:port"),
        ("a:7600,b:0", "b:0 is not host:port"),
        ("a:7600,b:65536", "b:65536 is not host:port"),
        ("a:7600,http://b:7600", "http://b:7600 is not host:port"),
        ("a:7600,a:7600", "comes twice"),
        (",".join(f"a:{n + 1}" for n in range(17)), "more than 16"),
    ],
)
def test_addresses_that_are_none_are_named(given: str, reason: str) -> None:
    with pytest.raises(InvalidState, match="MILLRACE_COORDINATOR: ") as refused:
        addresses(given)
    assert reason in refused.value.what and "host1:7600,host2:7600" in refused.value.fix


def test_addresses_of_several_coordinators() -> None:
    assert addresses("one:7600") == ["one:7600"]
    assert addresses("one:7600, [::1]:7600") == ["one:7600", "[::1]:7600"]
