"""A pool's replica in the test's own process, with a real engine, and a coordinator that knows of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from millrace.contracts.methods import ScoringRpc
from millrace.contracts.v1 import rollout_pb2
from millrace.ids import new_member_id
from millrace.spec import JobSpec
from millrace.wire.channel import Peer
from millrace.wire.server import Server
from services.rollout.member.process import HttpEndpoint
from services.rollout.pools.replica import PoolReplica
from services.rollout.pools.service import application, servicers
from tests.services.rollout.coordinator import JOB


@dataclass
class Scoring:
    replica: PoolReplica
    server: Server
    peer: Peer
    http: HttpEndpoint

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.http.port}"

    async def configure(self, spec: JobSpec, job: str = JOB) -> rollout_pb2.ConfigureRolloutResponse:
        request = rollout_pb2.ConfigureRolloutRequest(job_id=job, spec=spec.model_dump_json(), epoch=1)
        return await self.peer.call(ScoringRpc.Configure, request)

    async def die(self) -> None:
        """As by SIGKILL, for whoever calls it."""
        await self.http.stop()
        await self.server.stop(0.0)


@asynccontextmanager
async def pool_replica(pool: str, secret: str = "") -> AsyncIterator[Scoring]:
    """`secret`: the token of the deployment, at its HTTP endpoint."""
    replica = PoolReplica(new_member_id(pool), pool, "transformers", "test")
    server = Server(servicers(replica), "127.0.0.1", 0)
    http = HttpEndpoint(application(replica, secret), "127.0.0.1", 0)
    await server.start()
    http.start()
    peer = Peer(f"127.0.0.1:{server.port}")
    try:
        yield Scoring(replica, server, peer, http)
    finally:
        await peer.close()
        await http.stop()
        await server.stop(0.0)
        await replica.close()
