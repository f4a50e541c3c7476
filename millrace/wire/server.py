"""The gRPC server of every service: health, reflection, its log, the gate, limits, a stop that drains."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from millrace.contracts.v1 import logs_pb2, logs_pb2_grpc
from millrace.errors import Unavailable
from millrace.telemetry.logs import TAIL
from millrace.wire.channel import OPTIONS, token
from millrace.wire.gate import Gate, Observe, unobserved
from millrace.wire.tls import identity

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What gRPC tells a servicer of a call."""
LARGEST_GROUP_BYTES = 512 << 20
"""Largest message with a group that the coordinator takes; Redis takes no larger value. 16 answers of 32,768 tokens
with the routing of Qwen3-30B-A3B are 220 MB."""
LARGEST_MESSAGE_BYTES = 256 << 20
"""Largest message that a server takes by default. The largest legitimate ones hold the layouts of all ranks; gRPC
refuses a larger one by its length, before it is read."""
LIMITS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 256),  # of one connection; its further calls wait at the caller
    # Callers that connect and say nothing, and connections that nobody uses.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.http2.settings_timeout", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # No service compresses: a small message cannot become a large one.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]


LOGS = "millrace.v1.Logs"


class LogsServicer(logs_pb2_grpc.LogsServicer):
    """Logs of proto/millrace/v1/logs.proto."""

    async def Tail(self, request: logs_pb2.TailLogRequest, context: Context) -> logs_pb2.TailLogResponse:
        lines = [logs_pb2.LogLine(**asdict(line)) for line in TAIL.newest(request.lines)]
        return logs_pb2.TailLogResponse(lines=lines)


class Server:
    """Serves `servicers` at `host:port`; port 0 takes a free one. `servicers`: for each full service name, the function
    that adds the service to a server; Logs is added to every server. `largest_bytes`: of one message that it takes.
    `observe` is called at the end of each call with the path of its method, the name of its status code, and its
    seconds. Raises Unavailable if the port is taken."""

    def __init__(
        self,
        servicers: Mapping[str, Callable[[grpc.aio.Server], None]],
        host: str,
        port: int,
        largest_bytes: int = LARGEST_MESSAGE_BYTES,
        observe: Observe = unobserved,
    ) -> None:
        self._gate = Gate(token(), observe, identity())
        options = dict(OPTIONS) | dict(LIMITS) | {"grpc.max_receive_message_length": largest_bytes}
        self._server = grpc.aio.server(interceptors=[self._gate], options=[*options.items()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        logs_pb2_grpc.add_LogsServicer_to_server(LogsServicer(), self._server)
        for add in servicers.values():
            add(self._server)
        self._names = [*servicers, LOGS]
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            own, where = identity(), f"{host}:{port}"
            if own is None:
                self.port = self._server.add_insecure_port(where)
            else:
                self.port = self._server.add_secure_port(where, own.server_credentials())
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: the address is taken or not this host's.",
                "choose another port, or stop the process that uses it.",
            ) from error

    async def start(self, *, serving: bool = True) -> None:
        """Takes calls from now on. `serving`: what the health service answers."""
        await self._server.start()
        await self.healthy(serving)

    async def healthy(self, serving: bool) -> None:
        """Sets what the health service answers, for the whole server and for each of its services."""
        self._gate.serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def answered(self, within_s: float) -> None:
        """Returns once no call is in progress, or after `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._gate.idle.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Takes no new calls, waits at most `grace_s` for those in progress, then ends them."""
        self._gate.serving = False
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
