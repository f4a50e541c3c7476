"""A small scripted coordinator: the Fleet and Work services that a trainer calls, over real gRPC."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from millrace.contracts.v1 import common_pb2, fleet_pb2, work_pb2
from millrace.contracts.v1.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from millrace.contracts.v1.work_pb2_grpc import WorkServicer, add_WorkServicer_to_server
from millrace.errors import InvalidState, NotFound
from millrace.wire.server import Server


class Script(FleetServicer, WorkServicer):
    """The state and the answers of the coordinator. Tests change them and look at the requests that came."""

    def __init__(self) -> None:
        self.groups: dict[str, common_pb2.Group] = {}
        self.members: dict[str, fleet_pb2.RegisterRequest] = {}
        self.registrations = 0
        self.drained: list[str] = []
        """Members that said that they drain."""
        self.save_follows = False
        """What a member that says that it drains is told."""
        self.left: list[fleet_pb2.LeaveRequest] = []
        self.left_open: list[bool] = []
        """Whether the address of each that left still took connections."""
        self.beats: list[fleet_pb2.HeartbeatRequest] = []
        self.refusal = ""
        self.drain = False
        self.fetches: list[list[str]] = []
        self.hold = threading.Event()
        """Clear: Fetch waits."""
        self.hold.set()

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:
        if self.refusal:
            raise InvalidState(self.refusal, "run the same release everywhere.")
        self.members[request.member_id] = request
        self.registrations += 1
        return fleet_pb2.RegisterResponse(epoch=1, heartbeat_s=0.2, lost_after_s=5.0)

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Any) -> fleet_pb2.HeartbeatResponse:
        if request.member_id not in self.members:
            raise NotFound(f"no member {request.member_id}.", "register.")
        self.beats.append(request)
        return fleet_pb2.HeartbeatResponse(epoch=1, drain=self.drain)

    async def Drain(self, request: fleet_pb2.DrainRequest, context: Any) -> fleet_pb2.DrainResponse:
        self.drained.append(request.member_id)
        return fleet_pb2.DrainResponse(save_follows=self.save_follows)

    async def Leave(self, request: fleet_pb2.LeaveRequest, context: Any) -> fleet_pb2.LeaveResponse:
        host, _, port = self.members[request.member_id].address.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            self.left_open.append(True)
        except OSError:
            self.left_open.append(False)
        self.left.append(request)
        return fleet_pb2.LeaveResponse()

    async def Fetch(self, request: work_pb2.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        self.fetches.append(list(request.prompt_ids))
        await asyncio.to_thread(self.hold.wait)
        for prompt in request.prompt_ids:
            if prompt not in self.groups:
                raise NotFound(f"there is no group of prompt {prompt}.", "ask for one that there is.")
            yield self.groups[prompt]


class ScriptedCoordinator:
    """`script` behind a port, on a loop in a thread of its own."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(self._start(port))
        self.address = f"127.0.0.1:{self._server.port}"

    async def _start(self, port: int) -> Server:
        services = {
            "millrace.v1.Fleet": lambda grpc: add_FleetServicer_to_server(self.script, grpc),
            "millrace.v1.Work": lambda grpc: add_WorkServicer_to_server(self.script, grpc),
        }
        server = Server(services, "127.0.0.1", port)
        await server.start()
        return server

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def stop(self) -> None:
        self._run(self._server.stop(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextmanager
def coordinator(script: Script | None = None, port: int = 0) -> Iterator[ScriptedCoordinator]:
    served = ScriptedCoordinator(script or Script(), port)
    try:
        yield served
    finally:
        served.stop()
