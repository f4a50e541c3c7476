"""Channel and server against each other, over a real socket."""

import asyncio

import grpc
import numpy as np
import pytest
import structlog.testing
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace import errors
from millrace.contracts.methods import FleetRpc, WorkRpc
from millrace.contracts.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    nodes_pb2,
    rollout_pb2,
    trainer_pb2,
    work_pb2,
    work_pb2_grpc,
)
from millrace.errors import InvalidState, MillraceError, NotFound, PublicationFailed, Unavailable
from millrace.wire import arrays, channel, probe
from millrace.wire import server as server_module
from millrace.wire.channel import Peer
from millrace.wire.deadlines import DEADLINES_S
from millrace.wire.server import Server
from millrace.wire.status import error_of

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MillraceError)]
NAME = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name


class Fleet(fleet_pb2_grpc.FleetServicer):
    def __init__(self, behaviour):
        self.behaviour = behaviour

    async def Heartbeat(self, request, context):
        return await self.behaviour(request)


class Work(work_pb2_grpc.WorkServicer):
    async def Fetch(self, request, context):
        for prompt_id in request.prompt_ids:
            if prompt_id == "gone":
                raise NotFound("no group of prompt gone.")
            yield work_pb2.millrace_dot_v1_dot_common__pb2.Group(prompt_id=prompt_id)


async def served(behaviour, use, deadlines=DEADLINES_S):
    add = {
        NAME: lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(behaviour), server),
        "millrace.v1.Work": lambda server: work_pb2_grpc.add_WorkServicer_to_server(Work(), server),
    }
    server = Server(add, "127.0.0.1", 0)
    await server.start()
    peer = Peer(f"127.0.0.1:{server.port}", deadlines)
    try:
        return await use(peer, server)
    finally:
        await peer.close()
        await server.stop(0.1)


def heartbeat(peer, attempts=1):
    return peer.call(FleetRpc.Heartbeat, fleet_pb2.HeartbeatRequest(), attempts=attempts)


@pytest.mark.parametrize(
    "error",
    [
        *(kind(f"this is {kind.__name__}.", "do this.") for kind in CLASSES),
        PublicationFailed("rank 2 is silent.", "cut it out.", ("rollout-1", "rollout-2")),
        MillraceError("müde Ünicode — bytes.", "fix it – so."),
    ],
)
def test_an_error_is_the_same_error_at_the_caller(error):
    async def fails(request):
        raise error

    async def use(peer, server):
        with pytest.raises(MillraceError) as told:
            await heartbeat(peer)
        assert type(told.value) is type(error)
        assert str(told.value) == str(error)
        assert getattr(told.value, "culprits", ()) == getattr(error, "culprits", ())

    asyncio.run(served(fails, use))


def test_a_stream_ends_with_the_typed_error():
    async def use(peer, server):
        request = work_pb2.FetchRequest(prompt_ids=["a", "b", "gone"])
        got = []
        with pytest.raises(NotFound, match="gone"):
            async for group in peer.stream(WorkRpc.Fetch, request):
                got.append(group.prompt_id)
        assert got == ["a", "b"]

    asyncio.run(served(None, use))


def test_a_silent_server_costs_the_deadline_and_is_named():
    async def hangs(request):
        await asyncio.sleep(60)

    async def use(peer, server):
        with pytest.raises(Unavailable, match=rf"Fleet/Heartbeat at {peer.address} did not answer within 0.3 s"):
            await heartbeat(peer)

    asyncio.run(served(hangs, use, DEADLINES_S | {"Fleet/Heartbeat": 0.3}))


def test_an_address_where_nobody_listens():
    async def use():
        peer = Peer("127.0.0.1:1")
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached for Fleet/Heartbeat"):
            await heartbeat(peer, attempts=2)
        await peer.close()

    asyncio.run(use())


def test_a_call_that_a_server_cancels_as_it_ends_may_be_made_again():
    cancelled = grpc.aio.AioRpcError(
        grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Cancelling all calls"
    )
    assert isinstance(error_of(cancelled, "here:1", "Work/Complete", 10.0), Unavailable)


def test_a_port_that_is_taken():
    async def use(peer, server):
        with pytest.raises(Unavailable, match=rf"cannot listen on 127.0.0.1:{server.port}: the address is taken"):
            Server({}, "127.0.0.1", server.port)

    asyncio.run(served(None, use))


def test_a_method_that_the_server_does_not_know():
    async def use(peer, server):
        with pytest.raises(InvalidState, match="does not know Fleet/Drain"):
            await peer.call(FleetRpc.Drain, fleet_pb2.DrainRequest())

    class Old(fleet_pb2_grpc.FleetServicer):
        pass

    asyncio.run(served(None, use))


@pytest.mark.parametrize("given, refused", [("right", False), ("wrong", True), ("", True)])
def test_the_token(monkeypatch, given, refused):
    async def answers(request):
        return fleet_pb2.HeartbeatResponse(epoch=7)

    async def use(peer, server):
        monkeypatch.setenv("MILLRACE_TOKEN", given)
        caller = Peer(peer.address)
        if refused:
            with pytest.raises(InvalidState, match="set the same MILLRACE_TOKEN"):
                await heartbeat(caller)
        else:
            assert (await heartbeat(caller)).epoch == 7
        await caller.close()
        assert (await asyncio.to_thread(probe.serving, peer.address))[0], "health needs no token"

    monkeypatch.setenv("MILLRACE_TOKEN", "right")
    asyncio.run(served(answers, use))


def test_health_follows_the_server_and_reflection_lists_its_services():
    async def use(peer, server):
        assert (await asyncio.to_thread(probe.serving, peer.address)) == (True, f"{peer.address}: SERVING")
        await server.healthy(False)
        assert not (await asyncio.to_thread(probe.serving, peer.address))[0]
        async with grpc.aio.insecure_channel(peer.address) as channel:
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            reply = await anext(aiter(stub.ServerReflectionInfo(iter([ask]), timeout=5)))
        names = {service.name for service in reply.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names

    asyncio.run(served(None, use))
    assert not probe.serving("127.0.0.1:1")[0]


def test_every_method_has_a_deadline():
    methods = {
        f"{service.name}/{method.name}"
        for module in (fleet_pb2, work_pb2, rollout_pb2, nodes_pb2, trainer_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods <= set(DEADLINES_S)


def test_arrays_survive_the_wire():
    tokens, logprobs = [0, 5, 2**31 - 1], [-0.5, -1e-8, -123.25]
    assert arrays.unpack_tokens(arrays.pack_tokens(tokens)).tolist() == tokens
    assert np.array_equal(arrays.unpack_logprobs(arrays.pack_logprobs(logprobs)), np.float32(logprobs))


@pytest.mark.parametrize("experts", [8, 300])
def test_experts_survive_the_wire(experts):
    chosen_tlk = np.random.default_rng(0).integers(0, experts, (5, 3, 2))
    chosen_tlk[0, 0, 0] = experts - 1
    packed = arrays.pack_experts(chosen_tlk)
    assert len(packed.chosen) == 5 * 3 * 2 * (1 if experts <= 256 else 2)
    unpacked = arrays.unpack_experts(packed, tokens=7)
    assert unpacked.dtype == np.int16 and np.array_equal(unpacked[:5], chosen_tlk)
    assert (unpacked[5:] == arrays.NOT_REPORTED).all()
    with pytest.raises(ValueError, match="reported experts of 5 tokens, of 4"):
        arrays.unpack_experts(packed, tokens=4)


def test_a_call_outlasts_many_keepalive_pings(monkeypatch):
    faster = {"grpc.keepalive_time_ms": 200, "grpc.http2.min_ping_interval_without_data_ms": 100}
    assert faster.keys() <= dict(channel.OPTIONS).keys()
    monkeypatch.setattr(channel, "OPTIONS", [*(dict(channel.OPTIONS) | faster).items()])
    monkeypatch.setattr(server_module, "OPTIONS", channel.OPTIONS)

    async def behaviour(request):
        await asyncio.sleep(2.0)
        return fleet_pb2.HeartbeatResponse(epoch=9)

    async def use(peer, server):
        return await heartbeat(peer)

    assert asyncio.run(served(behaviour, use)).epoch == 9


@pytest.mark.parametrize(
    ("error", "level"),
    [(errors.Fenced("late."), "info"), (NotFound("ended."), "info"), (InvalidState("no version."), "warning")],
)
def test_refusals_that_belong_to_the_protocol_are_no_warnings(error: MillraceError, level: str) -> None:
    """A cancelled job has one for each answer on its way, and `millrace up` repeats warnings on its console."""

    async def refuse(request):
        raise error

    async def use(peer, server):
        with pytest.raises(type(error)):
            await heartbeat(peer)

    with structlog.testing.capture_logs() as lines:
        asyncio.run(served(refuse, use))
    assert [line["log_level"] for line in lines if line["event"] == "call refused"] == [level]
