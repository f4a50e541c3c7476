"""A replica of a pool that speaks the real contract and holds no model."""

from collections.abc import Callable, Mapping

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2, rollout_pb2, scoring_pb2_grpc
from millrace.ids import new_member_id
from millrace.wire.channel import PROTOCOL_VERSION
from tests.services.coordinator.peers import Member


class SimulatedScorer(Member, scoring_pb2_grpc.ScoringServicer):
    def __init__(self, coordinator: str, pool: str) -> None:
        super().__init__(coordinator)
        self.id = new_member_id(pool)
        self.pool = pool
        self.configured: list[str] = []
        """Jobs, in order."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def servicers(self) -> Mapping[str, Callable[..., None]]:
        return {"millrace.v1.Scoring": lambda server: scoring_pb2_grpc.add_ScoringServicer_to_server(self, server)}

    async def register(self) -> None:
        request = fleet_pb2.RegisterRequest(
            member_id=self.id,
            kind=self.kind,
            address=self.address,
            protocol_version=PROTOCOL_VERSION,
            engine="transformers",
            world_size=1,
            pool=self.pool,
        )
        await self.coordinator.call(FleetRpc.Register, request)

    async def Configure(self, request, context):
        await self.faults.strike("Configure", request)
        self.configured.append(request.job_id)
        return rollout_pb2.ConfigureRolloutResponse(world_size=1, dtype="float32")
