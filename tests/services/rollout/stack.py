"""A replica in the test's own process, with a real engine, beside a coordinator that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace.ids import new_member_id
from millrace.spec import JobSpec
from millrace.wire.channel import Peer
from millrace.wire.membership import Membership
from millrace.wire.server import Server
from services.rollout.replica import Replica
from services.rollout.server import servicers
from services.rollout.work.leases import Leases
from tests.models import random_model
from tests.sender import export
from tests.services.rollout.coordinator import JOB, Coordinator, configure, publish, until
from tests.services.rollout.jobs import job_spec


@dataclass
class Stack:
    coordinator: Coordinator
    replica: Replica
    membership: Membership
    peer: Peer
    """Calls the replica's own server."""
    address: str
    """Of the coordinator."""

    async def serve(self, spec: JobSpec, version: int = 1, job: str = JOB) -> None:
        """Configures the replica and brings it a version, as a coordinator does before the first lease."""
        await configure(self.peer, spec, job)
        await self.publish(version, getattr(torch, spec.rollout.dtype))

    async def publish(self, version: int, dtype: torch.dtype = torch.float32) -> None:
        model = random_model(tied=True, seed=version, dtype=dtype)
        await publish(self.peer, self.replica.member_id, export(model), version)


Scenario = Callable[[Stack], Awaitable[None]]


@asynccontextmanager
async def replica_stack(
    engine: str = "transformers", patience_s: float = 30.0, lease_s: float = 60.0
) -> AsyncIterator[Stack]:
    coordinator = Coordinator(lease_s=lease_s)
    address = await coordinator.start()
    calls = Peer(address)
    member_id = new_member_id("rollout")
    leases = Leases(calls, member_id)
    replica = Replica(member_id, engine, "test", leases)
    server = Server(servicers(replica), "127.0.0.1", 0)
    membership = replica.membership(calls, f"127.0.0.1:{server.port}", patience_s)
    leases.on_forgotten, leases.on_death = membership.forgotten, replica.died_of
    await server.start()
    await membership.join()
    loops = [asyncio.create_task(membership.run()), asyncio.create_task(leases.run())]
    peer = Peer(f"127.0.0.1:{server.port}")
    try:
        yield Stack(coordinator, replica, membership, peer, address)
    finally:
        loops[1].cancel()
        await replica.close()
        loops[0].cancel()
        await asyncio.wait(loops)
        for ended in loops:
            if not ended.cancelled():
                ended.result()
        await peer.close()
        await server.stop(0.1)
        await calls.close()
        await coordinator.stop()


def play(model: Path, scenario: Scenario) -> None:
    """Runs `scenario` on a replica that serves version 1."""

    async def whole() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(model), version=1)
            await scenario(stack)

    asyncio.run(whole())


async def restart(stack: Stack) -> None:
    """The coordinator stops; one with the same memory starts at the same address."""
    port = int(stack.address.rpartition(":")[2])
    await stack.coordinator.stop()
    await asyncio.sleep(0.5)
    await stack.coordinator.start(port)
    await until(lambda: stack.coordinator.server is not None)
