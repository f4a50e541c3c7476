"""The coordinator's gRPC services: translation between messages and the calls of fleet and queue."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc

from millrace.contracts.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, work_pb2, work_pb2_grpc
from millrace.errors import Fenced, InvalidState, NotFound
from millrace.ids import JobId, MemberId, PromptId
from millrace.wire.enums import drop_of
from millrace.wire.server import Context
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.observe.span_store import SpanStore
from services.coordinator.state.lease import LeaseRef
from services.coordinator.store import Store
from services.coordinator.work.queue import Queues


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Fleet of proto/millrace/v1/fleet.proto."""

    def __init__(self, fleet: Fleet, queues: Queues, spans: SpanStore) -> None:
        self._fleet = fleet
        self._queues = queues
        self._spans = spans

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Context) -> fleet_pb2.RegisterResponse:
        epoch = await self._fleet.register(request)
        patience = self._fleet.patience_now
        return fleet_pb2.RegisterResponse(
            epoch=epoch, heartbeat_s=patience.heartbeat_s, lost_after_s=patience.lost_after_s
        )

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Context) -> fleet_pb2.HeartbeatResponse:
        member = self._fleet.heartbeat(request)
        self._spans.received(member.partition, request.spans, request.span_count)
        return fleet_pb2.HeartbeatResponse(
            epoch=self._fleet.epoch, drain=member.draining, heartbeat_s=self._fleet.patience_now.heartbeat_s
        )

    async def Drain(self, request: fleet_pb2.DrainRequest, context: Context) -> fleet_pb2.DrainResponse:
        member = await self._fleet.drain(request.member_id)
        return fleet_pb2.DrainResponse(save_follows=member.trains)

    async def Leave(self, request: fleet_pb2.LeaveRequest, context: Context) -> fleet_pb2.LeaveResponse:
        await self._fleet.leave(request.member_id, request.reason, failed=request.failed)
        return fleet_pb2.LeaveResponse()

    async def FindPool(self, request: fleet_pb2.FindPoolRequest, context: Context) -> fleet_pb2.FindPoolResponse:
        job_id = JobId(request.job_id)
        members = await self._queues.of_job(job_id).partition.find_pool(request.pool, job_id, request.wait_s)
        return fleet_pb2.FindPoolResponse(
            addresses=[member.address for member in members],
            endpoints=[member.sessions_address for member in members],
        )


class WorkServicer(work_pb2_grpc.WorkServicer):
    """Work of proto/millrace/v1/work.proto."""

    def __init__(self, fleet: Fleet, queues: Queues, store: Store, prometheus: PrometheusMetrics) -> None:
        self._fleet = fleet
        self._queues = queues
        self._store = store
        self._prometheus = prometheus

    async def Lease(self, request: work_pb2.LeaseRequest, context: Context) -> work_pb2.LeaseResponse:
        member_id = MemberId(request.member_id)
        self._fleet.heard(member_id)
        queue = self._queues.of_member(member_id)
        leases, idle_reason = await queue.lease(member_id, request.free_samples, request.wait_s)
        return work_pb2.LeaseResponse(leases=leases, idle_reason=idle_reason)

    async def Extend(self, request: work_pb2.ExtendRequest, context: Context) -> work_pb2.ExtendResponse:
        member_id = MemberId(request.member_id)
        self._fleet.heard(member_id)
        lost: set[tuple[str, LeaseRef]] = set()
        expires_s = 0.0
        for job_id, leases in _by_job(request.leases).items():
            try:
                parts = _parts(job_id, request.parts)
                gone, expires_s = await self._queues.of_job(job_id).extend(member_id, job_id, leases, parts)
            except NotFound:
                gone = set(leases)
            lost |= {(job_id, lease) for lease in gone}
        refs = [ref for ref in request.leases if (ref.job_id, LeaseRef.of(ref)) in lost]
        return work_pb2.ExtendResponse(expires_s=expires_s, lost=refs)

    async def Complete(self, request: work_pb2.CompleteRequest, context: Context) -> work_pb2.CompleteResponse:
        member_id, job_id, lease = MemberId(request.member_id), JobId(request.ref.job_id), LeaseRef.of(request.ref)
        try:
            match request.WhichOneof("answer"):
                case "group":
                    await self._queues.of_job(job_id).complete(member_id, job_id, lease, request.group)
                case "drop":
                    await self._queues.of_job(job_id).refuse(member_id, job_id, lease, drop_of(request.drop))
                case _:
                    what = f"{member_id} answered lease {lease.id} with nothing."
                    raise InvalidState(what, "send a group, or a reason why there is none.")
        except Fenced:
            self._prometheus.fenced(job_id)
            raise
        return work_pb2.CompleteResponse()

    async def Release(self, request: work_pb2.ReleaseRequest, context: Context) -> work_pb2.ReleaseResponse:
        for job_id, leases in _by_job(request.leases).items():
            parts = _parts(job_id, request.parts)
            await self._queues.of_job(job_id).release(MemberId(request.member_id), job_id, leases, parts)
        return work_pb2.ReleaseResponse()

    async def Fetch(self, request: work_pb2.FetchRequest, context: Context) -> AsyncIterator[common_pb2.Group]:
        prompts = self._store.prompts(JobId(request.job_id))
        for prompt_id in map(PromptId, request.prompt_ids):
            group = await prompts.group(prompt_id)
            if group is None:
                what = f"{request.job_id} has no group for prompt {prompt_id}."
                raise NotFound(what, "fetch groups only between Step and its answer.")
            yield common_pb2.Group.FromString(group)


def servicers(fleet: FleetServicer, work: WorkServicer) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
    """The services by full name, for `millrace.wire.server.Server`."""
    return {
        "millrace.v1.Fleet": lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server),
        "millrace.v1.Work": lambda server: work_pb2_grpc.add_WorkServicer_to_server(work, server),
    }


def _by_job(refs: Sequence[work_pb2.LeaseRef]) -> dict[JobId, list[LeaseRef]]:
    parts: dict[JobId, list[LeaseRef]] = {}
    for ref in refs:
        parts.setdefault(JobId(ref.job_id), []).append(LeaseRef.of(ref))
    return parts


def _parts(job_id: JobId, reported: Sequence[work_pb2.LeaseParts]) -> dict[LeaseRef, bytes]:
    """The parts of each lease, serialized without its name: those of several messages, one after the other, are the
    message of all of them."""
    return {
        LeaseRef.of(one.ref): work_pb2.LeaseParts(parts=one.parts).SerializeToString()
        for one in reported
        if one.ref.job_id == job_id
    }
