"""Rank 0 towards other services: the gRPC server, the membership in the fleet, and the end of the trainer."""

import asyncio
import concurrent.futures
import os
import platform
import sys
from functools import partial

import structlog
import torch

import millrace
from millrace.contracts.v1 import fleet_pb2, weights_pb2
from millrace.contracts.v1.trainer_pb2_grpc import add_TrainerServicer_to_server
from millrace.errors import InvalidState, MillraceError
from millrace.ids import MemberId
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import members
from millrace.telemetry.metrics.prometheus import trainer as names
from millrace.telemetry.metrics.prometheus.endpoint import MetricsEndpoint
from millrace.telemetry.metrics.prometheus.every_service import describe_process, grpc_observer
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.spans.batches import taken
from millrace.telemetry.spans.kinds import LaneKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.telemetry.usage import GpuReading
from millrace.wire.address import bind_address
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.membership import Membership
from millrace.wire.server import Server
from millrace.wire.tls import server_context
from services.trainer.checkpoints.background_saver import BackgroundSaver
from services.trainer.publication.sender import Sender
from services.trainer.ranks.commands import CommandSender
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World
from services.trainer.service.servicer import TrainerService


class TrainerMetrics:
    """What Prometheus reads of the trainer: rank 0's process, and the last heartbeat of each rank."""

    def __init__(self, member_id: MemberId, heartbeats: Heartbeats) -> None:
        self.registry = DeclaredRegistry(Owner.TRAINER)
        describe_process(self.registry, Owner.TRAINER)
        self._member_id = member_id
        self._heartbeats = heartbeats
        self._counted_tokens = 0
        self._cpu_s: dict[int, float] = {}
        """CPU time of each rank that is counted already."""

    def published(self, report: weights_pb2.MemberReport) -> None:
        """Records the trainer's part in a publication whose weights it has sent."""
        members.record_publication(self.registry, report, members.SENDER_PHASES)

    def refresh(self, trainer: TrainerService) -> None:
        """Sets every gauge to what the trainer is now. On the event loop of its service."""
        members.describe_member(
            self.registry,
            member=self._member_id,
            engine="torch",
            engine_release=torch.__version__,
            job_id=trainer.job_id,
            version=trainer.version,
        )
        members.MEMBER_TOKENS.on(self.registry).inc(trainer.trained_tokens - self._counted_tokens)
        self._counted_tokens = trainer.trained_tokens
        self._ranks()

    def _ranks(self) -> None:
        names.RANKS.on(self.registry).set(self._heartbeats.ranks)
        readings: list[tuple[str, GpuReading]] = []
        for rank, (silent_s, usage) in self._heartbeats.heard().items():
            host = self._heartbeats.host(rank).partition(" ")[0]
            labels = {"rank": str(rank), "host": host}
            readings += [(host, usage.gpu)] if usage.gpu is not None else []
            names.RANK_SILENT_S.on(self.registry).labels(**labels).set(silent_s)
            names.RANK_RESIDENT.on(self.registry).labels(**labels).set(usage.resident_bytes)
            cpu_s = names.RANK_CPU_S.on(self.registry).labels(**labels)
            cpu_s.inc(max(0.0, usage.cpu_s - self._cpu_s.get(rank, 0.0)))
            self._cpu_s[rank] = usage.cpu_s
            for kind, size in usage.gpu_bytes.items():
                names.RANK_GPU_MEMORY.on(self.registry).labels(**labels, kind=kind).set(size)
        members.describe_gpus(self.registry, readings)


log = structlog.get_logger(__name__)
ANSWERED_S = 5.0
"""Longest wait, after a drain, until the calls in progress have their answers."""


class RankZero:
    """Serves the trainer and keeps it a member of the fleet, until it is drained or has failed."""

    def __init__(
        self,
        world: World,
        commands: CommandSender,
        heartbeats: Heartbeats,
        sender: Sender,
        saver: BackgroundSaver,
        member_id: MemberId,
        coordinator: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._world = world
        self._commands = commands
        self._heartbeats = heartbeats
        self._member_id = member_id
        self._coordinator = coordinator
        self._loop = loop
        self._ended = asyncio.Event()
        self._failure = ""
        self._metrics = TrainerMetrics(member_id, heartbeats)
        self._metrics_port = 0
        self._trainer = TrainerService(
            commands,
            sender,
            saver,
            member_id=member_id,
            world_size=world.size,
            on_failed=self._fail,
            on_sent=self._metrics.published,
        )

    def start(self, host: str, port: int, metrics_port: int) -> None:
        """Serves on the control thread. At the end the ranks get the command to stop. After a failure this process ends
        at once, because its main thread may be blocked for ever, and the other ranks end with it."""
        asyncio.run_coroutine_threadsafe(self._serve(host, port, metrics_port), self._loop).add_done_callback(
            self._finish
        )

    def _finish(self, served: concurrent.futures.Future[None]) -> None:
        error = served.exception()
        if isinstance(error, MillraceError):
            log.error("the trainer cannot continue", error=str(error))
        elif error is not None:
            log.error("the trainer cannot continue", exc_info=error)
        if error is not None or self._failure:
            sys.stderr.flush()
            os._exit(1)
        self._commands.stop()

    async def _serve(self, host: str, port: int, metrics_port: int) -> None:
        """Serves until drained or failed. Raises Unavailable if a port is taken."""
        servicers = {"millrace.v1.Trainer": lambda grpc: add_TrainerServicer_to_server(self._trainer, grpc)}
        bind, registry = bind_address(host), self._metrics.registry
        server = Server(servicers, bind, port, observe=grpc_observer(registry))
        refresh = partial(self._metrics.refresh, self._trainer)
        metrics = MetricsEndpoint(registry, bind, metrics_port, refresh, server_context())
        self._metrics_port = metrics.port
        await server.start()
        address = f"{host}:{server.port}"
        log.info("trainer serves", address=address, ranks=self._world.size, device=str(self._world.device))
        coordinator = Peer(self._coordinator)
        membership = Membership(
            coordinator, self._member_id, lambda: self._registration(address), self._heartbeat, self.drain
        )
        member = asyncio.create_task(membership.run())
        member.add_done_callback(self._membership_ended)
        await self._ended.wait()
        if not self._failure:
            log.info("draining")
            # Before calls are refused: nobody takes that for a failure then.
            save_follows = await membership.drain()
            await self._trainer.drain(save_follows=save_follows)
        await self._leave(server, membership, member)
        metrics.close()
        await coordinator.close()

    async def _leave(self, server: Server, membership: Membership, member: asyncio.Task[None]) -> None:
        """One that has drained leaves while its address still takes connections, so that it is not found dead. One that
        has failed tells its caller why before its fleet hears of it."""
        if failed := bool(self._failure):
            await server.stop()
        else:
            await server.answered(ANSWERED_S)
        member.cancel()
        await membership.leave(self._failure or "drained", failed=failed)
        await server.stop()

    def drain(self) -> None:
        """Ends the trainer after the call that runs, and once what it holds is on the disk. From any thread."""
        self._loop.call_soon_threadsafe(self._ended.set)

    def _fail(self, failure: str) -> None:
        log.error("the trainer has failed", failure=failure)
        self._failure = failure
        self._ended.set()

    def _membership_ended(self, member: asyncio.Task[None]) -> None:
        error = None if member.cancelled() else member.exception()
        if isinstance(error, InvalidState):
            self._fail(f"the coordinator refuses this trainer: {error}")
        elif error is not None:
            self._fail(f"membership ended: {error!r}")

    def _registration(self, address: str) -> fleet_pb2.RegisterRequest:
        return fleet_pb2.RegisterRequest(
            member_id=self._member_id,
            kind=fleet_pb2.MEMBER_KIND_TRAINER,
            address=address,
            protocol_version=PROTOCOL_VERSION,
            release=millrace.__version__,
            engine="torch",
            engine_release=torch.__version__,
            world_size=self._world.size,
            host=self._world.host,
            device=_device(self._world),
            metrics_port=self._metrics_port,
        )

    def _heartbeat(self) -> fleet_pb2.HeartbeatRequest:
        spans, count = taken(RECORDER, self._member_id, LaneKind.TRAINER)
        return fleet_pb2.HeartbeatRequest(
            member_id=self._member_id,
            version=self._trainer.version,
            tokens=self._trainer.trained_tokens,
            spans=spans,
            span_count=count,
            usage=self._heartbeats.usage(),
        )


def _device(world: World) -> str:
    if world.device.type == "cuda":
        return f"{world.size} x {torch.cuda.get_device_name(world.device)}"
    return f"cpu ({platform.machine()})"
