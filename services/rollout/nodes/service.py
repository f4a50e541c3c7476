"""The gRPC service of the leader, for its followers."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import grpc

from millrace.contracts.v1 import nodes_pb2, nodes_pb2_grpc
from services.rollout.nodes.leader import Leader

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class NodesServicer(nodes_pb2_grpc.NodesServicer):
    """Serves one leader."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def Join(self, request: nodes_pb2.JoinNodesRequest, context: Context) -> nodes_pb2.JoinNodesResponse:
        return await self._leader.join(request)

    async def Beat(self, request: nodes_pb2.NodeBeatRequest, context: Context) -> nodes_pb2.NodeBeatResponse:
        return await self._leader.beat(request)


def servicers(leader: Leader) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
    """The leader's service by its full name, for `millrace.wire.server.Server`."""
    servicer = NodesServicer(leader)
    return {"millrace.v1.Nodes": lambda server: nodes_pb2_grpc.add_NodesServicer_to_server(servicer, server)}
