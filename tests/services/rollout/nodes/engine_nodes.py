"""An engine over two nodes: two launchers on this machine, the coordinator that they belong to, and publications."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, weights_pb2, work_pb2
from millrace.local.ports import free_port
from millrace.spec import JobSpec
from millrace.weights.plans import wire_layouts
from millrace.wire.channel import Peer
from tests.models import save_tiny_model
from tests.processes import runs
from tests.sender import Sender, export
from tests.services.rollout.coordinator import JOB, Coordinator, Publication, until
from tests.services.rollout.jobs import ENGINE_OPTIONS, job_spec
from tests.shard_sender import Shards, ShardSender

WITHIN_S = 240.0
PARALLEL = {"vllm": {"tensor_parallel_size": 2}, "sglang": {"tp_size": 2}}
"""The option of each engine for two workers."""


@dataclass
class Node:
    process: asyncio.subprocess.Process
    log: Path

    @property
    def forked(self) -> list[psutil.Process]:
        """The processes that the launcher has forked, the node's own first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = [p for child in psutil.Process(self.process.pid).children() for p in child.children()]
            alive = [process for process in below if runs(process)]
            return sorted(alive, key=lambda process: process.create_time())
        return []


@dataclass
class Replica:
    """The two nodes, the coordinator that they belong to, and the job that they serve."""

    coordinator: Coordinator
    nodes: list[Node]
    spec: JobSpec
    peer: Peer

    @property
    def member_id(self) -> str:
        return self.coordinator.registrations[-1]

    async def registered(self, times: int) -> None:
        """Waits until the replica has registered so often."""
        await until(lambda: len(self.coordinator.registrations) >= times, WITHIN_S)

    async def publish(self, model: Any, version: int) -> None:
        """As the loader of vLLM itself puts it in place: whole tensors, broadcast to both workers."""
        sender = Sender(export(model), version=version, job=JOB, receivers=2)
        publication = Publication(self.peer, self.member_id, sender)
        await publication.prepare(receiver=weights_pb2.Receiver(member_id=self.member_id, first_rank=1, world_size=2))
        sender.start()
        await publication.transfer()
        await publication.verify()
        await asyncio.to_thread(sender.join)
        await publication.commit()

    async def publish_shards(self, model: Any, version: int) -> weights_pb2.MemberReport:
        """From two ranks with half of the rows each, to each worker what it wants."""
        shards = Shards(export(model))
        wanted = await self.peer.call(
            RolloutRpc.DescribeWeights,
            rollout_pb2.DescribeReceiveRequest(job_id=JOB, manifest=shards.manifest.to_proto()),
        )
        sender = ShardSender(shards, wire_layouts.decode(wanted.layouts), version=version, job=JOB)
        publication = Publication(self.peer, self.member_id, sender, weights_pb2.PATH_SHARDED)  # type: ignore[arg-type]
        request = sender.request
        meeting = weights_pb2.Rendezvous(
            host="127.0.0.1", port=sender.port, world_size=request.world_size, key=request.communicator
        )
        receiver = weights_pb2.Receiver(member_id=self.member_id, first_rank=2, world_size=2)
        await publication.prepare(
            rendezvous=meeting, receiver=receiver, plan_hash=sender.plan.hash, sides=request.layouts
        )
        sender.start()
        await publication.transfer()
        await asyncio.to_thread(sender.join)
        await publication.verify(sender.checksums)
        return await publication.commit()

    async def lose_follower(self) -> None:
        """Kills the follower: the replica is lost with it, is told so by the node's name, and comes back as another."""
        before, workers = self.member_id, [*self.nodes[0].forked, *self.nodes[1].forked]
        self.nodes[1].forked[0].kill()
        await until(lambda: before in self.coordinator.left, WITHIN_S)
        assert "node 1 (" in self.coordinator.left[before] and "is lost" in self.coordinator.left[before]
        await self.registered(2)
        assert not [process for process in workers if runs(process)]

    async def answer(self) -> rollout_pb2.GenerateResponse:
        sampling = work_pb2.Sampling(samples=1, max_response_tokens=24, temperature=0.0, top_p=1.0)
        request = rollout_pb2.GenerateRequest(prompt='"a question"', sampling=sampling)
        return await self.peer.call(RolloutRpc.Generate, request)


@asynccontextmanager
async def replica(folder: Path, engine: str = "vllm", dtype: str = "float32") -> AsyncIterator[Replica]:
    """Two nodes with one worker each, on the first and the second GPU where there are any, and the job that they
    serve."""
    coordinator, leader = Coordinator(), f"127.0.0.1:{free_port()}"
    options = ("--coordinator", await coordinator.start(), "--engine", engine, "--host", "127.0.0.1", "--nodes", "2")
    nodes = []
    for rank in (1, 0):
        log = folder / f"node-{rank}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.rollout.launch", *options, "--leader", leader, "--node-rank", str(rank)),
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "MILLRACE_NODE_LOST_S": "60",
                    "CUDA_VISIBLE_DEVICES": str(rank),
                },
            )
        nodes.append(Node(process, log))
    model = save_tiny_model(folder / "model", tied=True)
    rollout = {"dtype": dtype, "engine_options": {**ENGINE_OPTIONS[engine], **PARALLEL[engine]}}
    peer = Peer(leader)
    try:
        yield Replica(coordinator, nodes[::-1], job_spec(model, engine, rollout=rollout), peer)
    except BaseException:
        for node in nodes:
            print(node.log, node.log.read_text()[-20_000:], sep="\n")
        raise
    finally:
        await peer.close()
        for node in nodes:
            if node.process.returncode is None:
                for process in [*psutil.Process(node.process.pid).children(recursive=True), node.process]:
                    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                        process.kill()
                await node.process.wait()
        await coordinator.stop()
