"""The gRPC service of a replica: translation between the wire and the replica."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import grpc
import structlog

from millrace.contracts.v1 import rollout_pb2 as pb
from millrace.contracts.v1 import rollout_pb2_grpc, trainer_pb2, work_pb2
from millrace.errors import BadRow, InvalidJob, MillraceError
from millrace.ids import JobId
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from millrace.weights.phases import PublicationId
from millrace.weights.plans.manifest import Content
from millrace.wire.arrays import pack_tokens
from millrace.wire.server import Context
from services.rollout.replica import Replica
from services.rollout.weights.receiver import PublicationReceiver
from services.rollout.work.groups import sampling_of

T = TypeVar("T")
log = structlog.get_logger(__name__)


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """Serves one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._tasks: set[asyncio.Task[Any]] = set()

    async def Configure(self, request: pb.ConfigureRolloutRequest, context: Context) -> pb.ConfigureRolloutResponse:
        with span(SpanKind.CONFIGURE):
            return await self._to_its_end(self._replica.configure(JobId(request.job_id), request.spec))

    async def DescribeWeights(self, request: pb.DescribeReceiveRequest, context: Context) -> pb.DescribeReceiveResponse:
        return await self._to_its_end(self._replica.describe(request))

    async def PreparePublication(
        self, request: pb.PrepareReceiveRequest, context: Context
    ) -> pb.PrepareReceiveResponse:
        receiver = self._replica.receiver(request.publication.job_id)
        with span(SpanKind.PREPARE):
            agreed = await self._to_its_end(receiver.agree_on_plan(request))
        return pb.PrepareReceiveResponse(plan_hash=agreed.plan_hash, begun=agreed.begun, lacks_base=agreed.lacks_base)

    async def TransferPublication(
        self, request: pb.TransferReceiveRequest, context: Context
    ) -> pb.TransferReceiveResponse:
        receiver = self._replica.receiver(request.publication.job_id)
        await self._to_its_end(receiver.transfer(PublicationId.from_proto(request.publication)))
        return pb.TransferReceiveResponse()

    async def VerifyPublication(self, request: pb.VerifyReceiveRequest, context: Context) -> pb.VerifyReceiveResponse:
        return await self._to_its_end(_verify(self._replica.receiver(request.publication.job_id), request))

    async def CommitPublication(self, request: pb.CommitReceiveRequest, context: Context) -> pb.CommitReceiveResponse:
        receiver = self._replica.receiver(request.publication.job_id)
        with span(SpanKind.COMMIT):
            report = await self._to_its_end(receiver.commit(PublicationId.from_proto(request.publication)))
        return pb.CommitReceiveResponse(report=report)

    async def AbortPublication(self, request: pb.AbortReceiveRequest, context: Context) -> pb.AbortReceiveResponse:
        receiver = self._replica.receiver(request.publication.job_id)
        await self._to_its_end(receiver.abort(PublicationId.from_proto(request.publication), request.reason))
        return pb.AbortReceiveResponse()

    async def DescribeCopy(
        self, request: trainer_pb2.DescribeSendRequest, context: Context
    ) -> trainer_pb2.DescribeSendResponse:
        copies = self._replica.receiver(request.job_id).copies
        return await self._to_its_end(copies.describe(Content.of(request.content)))

    async def PrepareCopy(
        self, request: trainer_pb2.PrepareSendRequest, context: Context
    ) -> trainer_pb2.PrepareSendResponse:
        copies = self._replica.receiver(request.publication.job_id).copies
        return await self._to_its_end(copies.prepare_copy(request))

    async def TransferCopy(
        self, request: trainer_pb2.TransferSendRequest, context: Context
    ) -> trainer_pb2.TransferSendResponse:
        copies = self._replica.receiver(request.publication.job_id).copies
        with span(SpanKind.TRANSFER, detail="copy"):
            return await self._to_its_end(copies.transfer(PublicationId.from_proto(request.publication)))

    async def FinishCopy(
        self, request: trainer_pb2.FinishSendRequest, context: Context
    ) -> trainer_pb2.FinishSendResponse:
        copies = self._replica.receiver(request.publication.job_id).copies
        await self._to_its_end(copies.finish(PublicationId.from_proto(request.publication)))
        return trainer_pb2.FinishSendResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        generator = self._replica.generator()
        try:
            json.loads(request.prompt)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"the prompt is not JSON: {error}.", "send a list of messages, or a string.") from error
        prompt = await generator.job.prompt(work_pb2.Lease(prompt_id="debug-0", prompt=request.prompt))
        if prompt.rendered.dropped is not None:
            raise BadRow(f"the prompt is too long: {prompt.rendered.dropped.detail}.", "send a shorter one.")
        count = request.sampling.samples or 1
        ended = await generator.episodes(prompt, [sampling_of(request.sampling)] * count)
        return pb.GenerateResponse(
            prompt_tokens=pack_tokens(prompt.rendered.token_ids),
            trajectories=[message for episode in ended.episodes for message in episode.messages()],
        )

    async def GetStatus(self, request: pb.RolloutStatusRequest, context: Context) -> pb.RolloutStatus:
        replica = self._replica
        load = replica.load()
        return pb.RolloutStatus(
            member_id=replica.member_id,
            state=replica.state,
            job_id=replica.job_name,
            version=-1 if replica.version is None else replica.version,
            running=load.running,
            waiting=load.waiting,
            free=replica.room(load),
            generated_tokens=replica.leases.generated_tokens,
            engine=replica.engine_name,
            engine_release=replica.engine_release,
            failure=replica.failure,
            missing_boundaries=replica.missing_boundaries,
        )

    async def Drain(self, request: pb.DrainRolloutRequest, context: Context) -> pb.DrainRolloutResponse:
        self._replica.drain()
        return pb.DrainRolloutResponse()

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end even if the caller goes away. A phase cancelled half-way leaves the engine paused;
        a caller that comes back repeats its call."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_tell_failure)
            raise


async def _verify(receiver: PublicationReceiver, request: pb.VerifyReceiveRequest) -> pb.VerifyReceiveResponse:
    """VERIFY, and COMMIT if the request asks for both. A COMMIT that fails is answered: the caller is to know which
    of the two failed."""
    publication = PublicationId.from_proto(request.publication)
    with span(SpanKind.VERIFY):
        await receiver.verify(publication, tuple(request.checksums.values))
    if not request.commit:
        return pb.VerifyReceiveResponse()
    try:
        with span(SpanKind.COMMIT):
            return pb.VerifyReceiveResponse(report=await receiver.commit(publication))
    except MillraceError as error:
        log.warning("commit failed", publication=publication.key, error=str(error))
        return pb.VerifyReceiveResponse(commit_failure=str(error), commit_refused=isinstance(error, InvalidJob))


def _tell_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a call failed after its caller had gone away", error=str(error))


def servicers(replica: Replica) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
    """The replica's services by full name, for `millrace.wire.server.Server`."""
    servicer = RolloutServicer(replica)
    return {
        "millrace.v1.Rollout": lambda server: rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, server),
    }
