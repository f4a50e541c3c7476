"""The nodes of a replica without an engine: how they meet, start, watch each other and end."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.contracts.methods import NodesRpc
from millrace.contracts.v1 import nodes_pb2
from millrace.errors import Fenced, InvalidJob, InvalidState, Unavailable
from millrace.wire.channel import Peer
from services.rollout.nodes.follower import FollowerEnd
from services.rollout.nodes.leader import NodeLost
from services.rollout.nodes.place import LEADER_PORT, Place, network_environment
from tests.services.rollout.coordinator import until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.nodes.replica_nodes import WITHIN_S, ReplicaNodes

LONG_S = 600.0
"""Silence that no test waits for."""


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(2 * WITHIN_S):
            await scenario

    asyncio.run(whole())


async def built() -> int:
    return 7


def test_they_meet_start_stop_and_end_as_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ReplicaNodes(3, LONG_S) as replica,
            replica.follower(1) as (_, first, one),
            replica.follower(2) as (_, second, two),
        ):
            await replica.whole()
            replica.leader.serve_job(job_spec(tmp_path).model_dump_json())
            assert await replica.start(built()) == 7
            await until(lambda: first.started and second.started, WITHIN_S)
            start = first.started[0]
            assert (start.rank, second.started[0].rank) == (1, 2)
            assert start.worker_rpc == "tcp://secret@127.0.0.1:1"
            assert (start.port, start.seed) == (second.started[0].port, second.started[0].seed)
            stops = first.stops
            await replica.leader.stop()
            assert first.stops > stops
            await replica.leader.end("it was told to stop", for_good=True)
            assert [await one, await two] == [FollowerEnd.FOR_GOOD] * 2
            assert not replica.lost

    play(scenario())


def test_a_generation_that_failed_is_followed_by_another() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower() as (_, _, running):
            await replica.whole()
            await replica.leader.end("the engine died", for_good=False)
            assert await running is FollowerEnd.REJOIN

    play(scenario())


def test_nodes_that_do_not_come_are_named() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(3, LONG_S) as replica, replica.follower(2):
            await until(lambda: replica.leader.hosts, WITHIN_S)
            with pytest.raises(Unavailable, match=r"node 1 of 3 have not joined within 0\.1 s.*--node-rank"):
                await replica.leader.whole(0.1)

    play(scenario())


def test_a_follower_that_is_killed_is_found_by_its_next_life() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica:
            async with replica.follower():
                await replica.whole()
            async with replica.follower() as (follower, _, _):
                await until(lambda: replica.lost, WITHIN_S)
                assert "node 1 (" in str(replica.lost[0]) and "it has ended" in str(replica.lost[0])
                assert not follower.joined, "a new follower does not join an old generation"
                with pytest.raises(NodeLost, match="node 1"):
                    await replica.leader.start("tcp://")
                await replica.server.stop(0.0)
                async with ReplicaNodes(2, LONG_S, replica.server.port, "rollout-2") as next_life:
                    await next_life.leader.whole(WITHIN_S)
                    await until(lambda: follower.joined, WITHIN_S)

    play(scenario())


def test_a_silent_follower_is_lost_after_the_deadline() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, 1.0) as replica, replica.follower() as (_, _, running):
            await replica.whole()
            running.cancel()
            await until(lambda: replica.lost, WITHIN_S)
            assert "it has not answered for" in str(replica.lost[0])

    play(scenario())


def test_nodes_that_died_with_the_engine_are_named() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(3, LONG_S) as replica, replica.follower(1), replica.follower(2) as (_, _, killed):
            await replica.whole()
            assert await replica.leader.silent() == []
            killed.cancel()
            await asyncio.wait({killed})
            (name,) = await replica.leader.silent()
            assert name.startswith("node 2 (") and not replica.lost

    play(scenario())


def test_a_follower_ends_where_the_leader_is_gone() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, 1.0) as replica, replica.follower() as (_, share, running):
            await replica.whole()
            await replica.server.stop(0.0)
            assert await running is FollowerEnd.REJOIN
            assert share.stops

    play(scenario())


def test_a_follower_of_an_older_generation_is_refused() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower() as (_, _, running):
            await replica.whole()
            await replica.server.stop(0.0)
            async with ReplicaNodes(2, LONG_S, replica.server.port, "rollout-2") as next_life:
                assert await running is FollowerEnd.REJOIN
                assert not next_life.leader.hosts
                peer = Peer(f"127.0.0.1:{next_life.server.port}")
                old = nodes_pb2.NodeBeatRequest(generation="rollout-1", life="rollout-x", node_rank=1)
                with pytest.raises(Fenced, match="no node of rollout-2"):
                    await peer.call(NodesRpc.Beat, old)
                await peer.close()

    play(scenario())


@pytest.mark.parametrize("error", [InvalidJob("model.path: there is no such folder."), Unavailable("no memory.")])
def test_what_a_follower_refuses_the_engine_refuses(tmp_path: Path, error: InvalidJob | Unavailable) -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower() as (_, share, _):
            await replica.whole()
            replica.leader.serve_job(job_spec(tmp_path).model_dump_json())
            share.refuse = error
            building: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            with pytest.raises(type(error), match=rf"node 1 \(.*\): {error.what}"):
                await replica.start(building, partial(building.set_exception, Unavailable("given up.")))
            assert not replica.lost, "the job is at fault, not the node"
            await replica.leader.stop()
            share.refuse = None
            assert await replica.start(built()) == 7

    play(scenario())


def test_what_both_refuse_is_the_loss_of_no_node(tmp_path: Path) -> None:
    async def refused() -> int:
        raise InvalidJob("the leader refuses it.")

    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower() as (_, share, _):
            await replica.whole()
            replica.leader.serve_job(job_spec(tmp_path).model_dump_json())
            share.refuse = InvalidJob("so does the follower.")
            share.refuse_when.clear()
            await replica.leader.start("tcp://")
            await until(lambda: share.started, WITHIN_S)
            stops = share.stops
            with pytest.raises(InvalidJob, match="the leader refuses it"):
                await replica.leader.or_failure(refused(), lambda: None)
            share.refuse_when.set()
            await until(lambda: replica.lost or share.stops > stops, WITHIN_S)
            await replica.leader.stop()
            assert not replica.lost
            share.refuse = None
            assert await replica.start(built()) == 7

    play(scenario())


def test_workers_that_end_end_the_generation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower() as (_, share, _):
            await replica.whole()
            replica.leader.serve_job(job_spec(tmp_path).model_dump_json())
            await replica.start(built())
            await until(lambda: share.started, WITHIN_S)
            share.end.set_result("worker 1 was ended by SIGKILL.")
            await until(lambda: replica.lost, WITHIN_S)
            assert "node 1 (" in str(replica.lost[0]) and "worker 1 was ended by SIGKILL" in str(replica.lost[0])

    play(scenario())


def test_a_loss_ends_a_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica:
            building: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            async with replica.follower() as (_, share, _):
                await replica.whole()
                replica.leader.serve_job(job_spec(tmp_path).model_dump_json())
                share.hang = True
                give_up = partial(building.set_exception, Unavailable("given up."))
                starting = asyncio.create_task(replica.start(building, give_up))
                await until(lambda: share.started, WITHIN_S)
            async with replica.follower():
                with pytest.raises(NodeLost, match="node 1"):
                    await starting

    play(scenario())


def test_a_follower_that_is_told_to_stop_drains_the_replica() -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower() as (follower, _, running):
            await replica.whole()
            follower.drain()
            await until(lambda: replica.drains, WITHIN_S)
            await replica.leader.end("it was told to stop", for_good=True)
            assert await running is FollowerEnd.FOR_GOOD

    play(scenario())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 3}, "one of 3 nodes, and node 0 is one of 2"),
        ({"rank": 2}, "node 2 .* one of 2 nodes"),
        ({"engine": ("vllm", "0.2")}, r"has vllm 0\.2, node 0 vllm 0\.1"),
    ],
)
def test_a_node_with_other_settings_is_refused(settings: dict[str, Any], said: str) -> None:
    async def scenario() -> None:
        async with ReplicaNodes(2, LONG_S) as replica, replica.follower(**settings) as (_, _, running):
            with pytest.raises(InvalidState, match=said):
                await running

    play(scenario())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("transformers", 2, 0, "a"), "--nodes: 2: the engine transformers lies on one host. Fix: leave --nodes out"),
        (("vllm", 1, 1, ""), "--node-rank: 1: the replica has one node"),
        (("vllm", 1, 0, "a:1"), '--leader: "a:1": the replica has one node'),
        (("vllm", 2, 2, "a"), "--node-rank: 2: the nodes are numbered 0 to 1"),
        (("vllm", 2, 0, ""), '--leader: "": is no address'),
        (("vllm", 2, 0, "a:x"), '--leader: "a:x": is no address'),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[str, int, int, str], said: str) -> None:
    with pytest.raises(InvalidState) as refused:
        Place.of(*options)
    assert said in str(refused.value)


def test_the_place_of_a_node() -> None:
    assert Place.of("vllm", 1, 0, "") is None
    place = Place.of("vllm", 2, 0, "gpu-a")
    assert place == Place(0, 2, "gpu-a", LEADER_PORT) and place.own_port(0) == LEADER_PORT
    assert Place.of("sglang", 4, 3, "10.0.0.1:9000") == Place(3, 4, "10.0.0.1", 9000)
    with pytest.raises(InvalidState, match="--port: 1: --leader names port 7650"):
        place.own_port(1)


def test_the_interface_of_the_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOST", "127.0.0.1")
    found = network_environment()
    assert found["VLLM_HOST_IP"] == "127.0.0.1" and found["GLOO_SOCKET_IFNAME"] == "lo"
