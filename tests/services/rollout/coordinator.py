"""A coordinator that does what a test tells it: real gRPC services, a queue in memory, publications step by step."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    rollout_pb2,
    weights_pb2,
    work_pb2,
    work_pb2_grpc,
)
from millrace.drops import Drop, DropReason
from millrace.errors import Fenced, InvalidState, NotFound
from millrace.spec import JobSpec
from millrace.telemetry.spans.context import TraceContext
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.enums import drop_of
from millrace.wire.server import Server
from tests.sender import Sender

JOB = "job-test"


@dataclass
class Coordinator(fleet_pb2_grpc.FleetServicer, work_pb2_grpc.WorkServicer):
    """Leases `waiting` in order; keeps what comes back. `forgotten` members get NOT_FOUND until they register."""

    protocol_version: int = PROTOCOL_VERSION
    withholds: bool = False
    """Whether requests for leases wait although there are some. `withheld` counts their looks."""
    withheld: int = 0
    lease_s: float = 60.0
    waiting: list[work_pb2.Lease] = field(default_factory=list)
    leased: dict[str, work_pb2.Lease] = field(default_factory=dict)
    groups: dict[str, common_pb2.Group] = field(default_factory=dict)
    dropped: dict[str, Drop] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    members: dict[str, fleet_pb2.RegisterRequest] = field(default_factory=dict)
    registrations: list[str] = field(default_factory=list)
    beats: list[fleet_pb2.HeartbeatRequest] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    extends: int = 0
    parts: dict[str, list[work_pb2.Part]] = field(default_factory=dict)
    """What came of each lease."""
    pools: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of the replicas of each pool. `pools_asked` counts the questions for them."""
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of their OpenAI-compatible endpoints."""
    pools_asked: int = 0
    server: Server | None = None

    async def start(self, port: int = 0) -> str:
        self.server = Server(
            {
                "millrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(self, s),
                "millrace.v1.Work": lambda s: work_pb2_grpc.add_WorkServicer_to_server(self, s),
            },
            "127.0.0.1",
            port,
        )
        await self.server.start()
        return f"127.0.0.1:{self.server.port}"

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0.0)

    # Fleet.

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.RegisterResponse:
        if request.protocol_version != self.protocol_version:
            raise InvalidState(
                f"{request.member_id} speaks protocol {request.protocol_version}, this coordinator "
                f"{self.protocol_version}.",
                "run the same release of millrace everywhere.",
            )
        self.members[request.member_id] = request
        self.registrations.append(request.member_id)
        return fleet_pb2.RegisterResponse(epoch=1, heartbeat_s=0.1, lost_after_s=5.0)

    async def Heartbeat(
        self, request: fleet_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.HeartbeatResponse:
        self._known(request.member_id)
        self.beats.append(request)
        return fleet_pb2.HeartbeatResponse(epoch=1, drain=request.member_id in self.draining)

    async def Drain(
        self, request: fleet_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.DrainResponse:
        self.draining.add(request.member_id)
        return fleet_pb2.DrainResponse()

    async def Leave(
        self, request: fleet_pb2.LeaveRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.LeaveResponse:
        self.left[request.member_id] = request.reason
        self.members.pop(request.member_id, None)
        return fleet_pb2.LeaveResponse()

    async def FindPool(
        self, request: fleet_pb2.FindPoolRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.FindPoolResponse:
        self.pools_asked += 1
        for _ in range(int(request.wait_s / 0.02)):
            if self.pools.get(request.pool):
                break
            await asyncio.sleep(0.02)
        addresses, endpoints = (known.get(request.pool, []) for known in (self.pools, self.endpoints))
        return fleet_pb2.FindPoolResponse(addresses=addresses, endpoints=endpoints)

    def _known(self, member_id: str) -> None:
        if member_id not in self.members:
            raise NotFound(f"{member_id} is not registered.", "register it.")

    # Work.

    async def Lease(self, request: work_pb2.LeaseRequest, context: grpc.aio.ServicerContext) -> work_pb2.LeaseResponse:
        self._known(request.member_id)
        for _ in range(int(request.wait_s / 0.02)):
            if request.member_id in self.draining:
                return work_pb2.LeaseResponse(idle_reason="draining")
            if self.withholds:
                self.withheld += 1
            elif self.waiting:
                break
            await asyncio.sleep(0.02)
        free, leases = request.free_samples, []
        while self.waiting and not self.withholds and self.waiting[0].sampling.samples <= free:
            lease = self.waiting.pop(0)
            free -= lease.sampling.samples
            self.leased[lease.ref.lease_id] = lease
            leases.append(lease)
        return work_pb2.LeaseResponse(leases=leases)

    async def Extend(
        self, request: work_pb2.ExtendRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.ExtendResponse:
        self._known(request.member_id)
        self.extends += 1
        self._keep(request.parts)
        lost = [ref for ref in request.leases if ref.lease_id in self.lost]
        return work_pb2.ExtendResponse(expires_s=self.lease_s, lost=lost)

    async def Complete(
        self, request: work_pb2.CompleteRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.CompleteResponse:
        lease = self.leased.get(request.ref.lease_id)
        if lease is None or lease.ref.fence != request.ref.fence:
            raise Fenced(f"lease {request.ref.lease_id} is somebody else's.")
        if request.WhichOneof("answer") == "group":
            if failure := next((one.reward_failure for one in request.group.trajectories if one.reward_failure), ""):
                self.dropped[lease.prompt_id] = Drop(DropReason.REWARD_FAILED, failure)  # as the coordinator does
            else:
                self.groups[lease.prompt_id] = request.group
        else:
            self.dropped[lease.prompt_id] = drop_of(request.drop)
        return work_pb2.CompleteResponse()

    async def Release(
        self, request: work_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.ReleaseResponse:
        self.released += [ref.lease_id for ref in request.leases]
        self._keep(request.parts)
        return work_pb2.ReleaseResponse()

    def _keep(self, parts: Iterable[work_pb2.LeaseParts]) -> None:
        for one in parts:
            self.parts.setdefault(one.ref.lease_id, []).extend(one.parts)

    # What a test asks for.

    def issue_again(self, lease_id: str) -> None:
        """Leases a prompt to the next who asks, with the parts that came, under a higher fence."""
        lease = self.leased.pop(lease_id)
        lease.ref.fence += 1
        del lease.parts[:]
        lease.parts.extend(self.parts[lease_id])
        self.waiting.append(lease)

    def issue(self, number: int, prompt: Any = None, ground_truth: Any = "x", **sampling: Any) -> str:
        """Puts a prompt on the queue and returns its id."""
        wanted = {"samples": 4, "max_response_tokens": 16, "temperature": 1.0, "top_p": 1.0} | sampling
        lease = work_pb2.Lease(
            ref=work_pb2.LeaseRef(job_id=JOB, lease_id=f"lease-{number}", fence=1, purpose=common_pb2.PURPOSE_TRAIN),
            prompt_id=f"0-{number}",
            purpose=common_pb2.PURPOSE_TRAIN,
            sampling=work_pb2.Sampling(**wanted),
            data_source="test",
            prompt=json.dumps(prompt or [{"role": "user", "content": f"question {number}"}]),
            ground_truth=json.dumps(ground_truth),
            expires_s=self.lease_s,
            traceparent=TraceContext.new(JOB).traceparent,
        )
        self.waiting.append(lease)
        return lease.prompt_id

    @property
    def answered(self) -> int:
        return len(self.groups) + len(self.dropped)


async def until(condition: Any, seconds: float = 30.0) -> None:
    """Waits until `condition()` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def configure(replica: Peer, spec: JobSpec, job: str = JOB) -> rollout_pb2.ConfigureRolloutResponse:
    request = rollout_pb2.ConfigureRolloutRequest(job_id=job, spec=spec.model_dump_json(), epoch=1)
    return await replica.call(RolloutRpc.Configure, request)


async def status(replica: Peer) -> rollout_pb2.RolloutStatus:
    return await replica.call(RolloutRpc.GetStatus, rollout_pb2.RolloutStatusRequest())


class Publication:
    """One publication to one replica over gRPC, phase by phase."""

    def __init__(self, replica: Peer, member_id: str, sender: Sender, path: int = weights_pb2.PATH_GATHER_BROADCAST):
        self.replica = replica
        self.member_id = member_id
        self.sender = sender
        self.path = path
        job, version, epoch, attempt = sender.request.key.rsplit("/", 3)
        self.ref = weights_pb2.PublicationRef(job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt))

    async def prepare(self, **changes: Any) -> bytes:
        return bytes((await self.prepared(**changes)).plan_hash)

    async def prepared(self, **changes: Any) -> rollout_pb2.PrepareReceiveResponse:
        transfer_request = self.sender.request
        fields: dict[str, Any] = {
            "publication": self.ref,
            "path": self.path,
            "manifest": transfer_request.manifest.to_proto(),
            "rendezvous": weights_pb2.Rendezvous(
                host="127.0.0.1", port=transfer_request.port, world_size=transfer_request.world_size
            ),
            "receiver": weights_pb2.Receiver(member_id=self.member_id, first_rank=1, world_size=1),
            "plan_hash": gather_broadcast(transfer_request.manifest, transfer_request.world_size).hash,
            "deadline_s": 30.0,
        } | changes
        return await self._call(RolloutRpc.PreparePublication, rollout_pb2.PrepareReceiveRequest(**fields))

    async def transfer(self) -> None:
        await self._call(RolloutRpc.TransferPublication, rollout_pb2.TransferReceiveRequest(publication=self.ref))

    async def verify(
        self, checksums: tuple[int, ...] | None = None, commit: bool = False
    ) -> rollout_pb2.VerifyReceiveResponse:
        values = self.sender.checksums if checksums is None else checksums
        sums = weights_pb2.Checksums(values=values)
        request = rollout_pb2.VerifyReceiveRequest(publication=self.ref, checksums=sums, commit=commit)
        return await self._call(RolloutRpc.VerifyPublication, request)

    async def commit(self) -> weights_pb2.MemberReport:
        reply = await self._call(RolloutRpc.CommitPublication, rollout_pb2.CommitReceiveRequest(publication=self.ref))
        return reply.report

    async def abort(self, reason: str = "the test says so") -> None:
        await self._call(
            RolloutRpc.AbortPublication, rollout_pb2.AbortReceiveRequest(publication=self.ref, reason=reason)
        )

    async def whole(self) -> weights_pb2.MemberReport:
        await self.prepare()
        self.sender.start()
        await self.transfer()
        await self.verify()
        self.sender.join()
        return await self.commit()

    async def _call(self, method: Unary[Request, Response], request: Request) -> Response:
        return await self.replica.call(method, request)


async def publish(
    replica: Peer, member_id: str, tensors: Mapping[str, torch.Tensor], version: int, **options: Any
) -> weights_pb2.MemberReport:
    """All phases, one after the other."""
    return await Publication(replica, member_id, Sender(tensors, version=version, job=JOB, **options)).whole()
