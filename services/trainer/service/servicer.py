"""The Trainer service: which call may come when, and which call repeats one that runs or is done."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from millrace.contracts.method import Unary
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.contracts.v1.trainer_pb2_grpc import TrainerServicer
from millrace.errors import Fenced, MillraceError, NotFound, OutOfMemory, PartialOutOfMemory, PartialStep
from millrace.ids import JobId, Version
from millrace.spec import JobSpec, received
from millrace.telemetry.spans.context import current
from millrace.telemetry.spans.recorder import span
from millrace.weights.phases import Phase, PublicationId, PublicationState
from millrace.wire.deadlines import DEADLINES_S
from millrace.wire.server import Context
from services.trainer.publication.sender import Sender
from services.trainer.ranks.commands import RanksFailed
from services.trainer.service.progress import (
    WORK,
    CallKey,
    CallLock,
    ConfiguredJob,
    PublicationProgress,
    Ranks,
    SaveProgress,
    Saves,
    content_of,
)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")

SAVE_ASKED_S = 10.0
"""Longest wait, during a drain, until the coordinator asks for the checkpoint that it has announced."""
ENDS_S = 1.0
"""Ranks end a transfer by themselves at its deadline. Ranks that have not ended it this long afterwards are blocked."""


class TrainerService(TrainerServicer):
    """Runs on rank 0's control thread. A caller that goes away does not end the call that it began."""

    def __init__(
        self,
        ranks: Ranks,
        sender: Sender,
        saves: Saves,
        *,
        member_id: str,
        world_size: int,
        on_failed: Callable[[str], None],
        on_sent: Callable[[weights_pb2.MemberReport], None] = lambda _: None,
    ) -> None:
        """`on_failed` is called if the ranks cannot continue, `on_sent` with the report of each publication whose
        weights were sent."""
        self._ranks = ranks
        self._sender = sender
        self._saves = saves
        self._member_id = member_id
        self._world_size = world_size
        self._on_failed = on_failed
        self._on_sent = on_sent
        self._lock = CallLock()
        self._job: ConfiguredJob | None = None
        self._publishing = PublicationProgress()
        self._saving: SaveProgress | None = None
        self._save_asked = asyncio.Event()
        """Set by a save that was asked for during the drain."""
        self._failure = ""
        self.trained_tokens = 0

    @property
    def job_id(self) -> str:
        """The job that is loaded; empty: none."""
        return self._job.job_id if self._job else ""

    @property
    def version(self) -> int:
        return self._job.version if self._job else -1

    async def drain(self, *, save_follows: bool = False) -> None:
        """Refuses new calls, and waits for the call that runs and for a checkpoint that is being written. Where
        `save_follows`, and what is held was not saved, it waits before for the coordinator to ask for that."""
        self._lock.closed = self._lock.closed or "the trainer is draining"
        self._lock.open_to = "Save" if save_follows else ""
        await self._lock.wait_until_free()
        if save_follows and self._job is not None and self._job.saved != self._job.version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_ASKED_S):
                    await self._save_asked.wait()
            await self._lock.wait_until_free()
        self._lock.open_to = ""
        await self._saved()

    async def Configure(self, request: pb.ConfigureTrainerRequest, context: Context) -> pb.ConfigureTrainerResponse:
        job = self._job
        asked = (request.job_id, request.checkpoint, request.configuration)
        if job is None or (job.job_id, job.checkpoint, job.configuration) != asked:
            spec = received(request.spec)
            key, reason = CallKey("Configure", ConfiguredJob, asked), f"{request.job_id} is loaded"
            job = await self._take_over(key, lambda: self._configure(request, spec), reason)
        return pb.ConfigureTrainerResponse(
            version=job.version,
            world_size=self._world_size,
            parameters=job.parameters,
            warnings=job.warnings,
            microbatches_at_once=job.microbatches_at_once,
        )

    async def _configure(self, request: pb.ConfigureTrainerRequest, spec: JobSpec) -> ConfiguredJob:
        await self._saved()
        self._job = None
        deadline_s = spec.deadlines.of_calls()["Trainer/Configure"]
        reply = await self._on_ranks(TrainerRpc.Configure, request, deadline_s)
        version = Version(reply.version)
        loaded = (spec, version, reply.parameters, tuple(reply.warnings), reply.microbatches_at_once)
        self._job = ConfiguredJob(JobId(request.job_id), request.checkpoint, request.configuration, *loaded)
        self._publishing = PublicationProgress()
        return self._job

    async def AddPart(self, request: pb.AddPartRequest, context: Context) -> pb.AddPartResponse:
        job, part = self._configured_for(request.part.job_id), request.part
        ended = job.last_step is not None and job.last_step[0] == part.step == job.version
        if ended or self._runs("Step", part.job_id, part.step):
            return pb.AddPartResponse()  # the step has the part: the caller is about to ask for the step
        if self._runs("AddPart"):
            await self._lock.wait_until_free()
        job.check_next(part.step)
        content = content_of(part)
        if job.parts[part.part : part.part + 1] == [content]:
            return pb.AddPartResponse()
        if part.part:
            job.check_parts(part)
        key = CallKey("AddPart", pb.AddPartResponse, (part.job_id, part.step, part.part, content))
        reason = f"part {part.part} of step {part.step} is added"
        return await self._take_over(key, lambda: self._add_part(request, job, content), reason)

    async def _add_part(self, request: pb.AddPartRequest, job: ConfiguredJob, content: bytes) -> pb.AddPartResponse:
        before, job.parts = job.parts[: request.part.part], []
        reply = await self._on_ranks(TrainerRpc.AddPart, request, job.deadline("AddPart"))
        job.parts = [*before, content]
        self._count(request.part)
        return reply

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        job = self._configured_for(request.job_id)
        if job.last_step is not None and job.last_step[0] == request.step == job.version:
            return job.last_step[1]
        if self._runs("AddPart"):
            await self._lock.wait_until_free()
        job.check_next(request.step)
        key = CallKey("Step", pb.StepResponse, (request.job_id, request.step))
        if request.part and not self._runs("Step", *key.arguments):
            job.check_parts(request)
        return await self._lock.run(key, lambda: self._step(request, job))

    async def _step(self, request: pb.StepRequest, job: ConfiguredJob) -> pb.StepResponse:
        job.parts = []  # whether it succeeds or fails
        try:
            reply = await self._on_ranks(TrainerRpc.Step, request, job.deadline("Step"))
        except (PartialStep, PartialOutOfMemory):
            self._job = None  # as on the ranks
            raise
        job.version, job.last_step = Version(reply.version), (request.step, reply)
        self._count(request)
        return reply

    def _count(self, request: pb.StepRequest) -> None:
        self.trained_tokens += sum(
            sum(group.response_tokens) + sum(one.sampled_tokens for one in group.trajectories)
            for group in request.groups
        )

    async def DescribeWeights(self, request: pb.DescribeSendRequest, context: Context) -> pb.DescribeSendResponse:
        self._configured_for(request.job_id)
        method = TrainerRpc.DescribeWeights
        key = CallKey(method.name, pb.DescribeSendResponse, (request.job_id, request.dtype))
        deadline_s = DEADLINES_S[method.key]
        reason = f"another publication of {request.job_id} begins"
        return await self._take_over(key, lambda: self._on_ranks(method, request, deadline_s), reason)

    async def PreparePublication(self, request: pb.PrepareSendRequest, context: Context) -> pb.PrepareSendResponse:
        self._configured_for(request.publication.job_id)
        publication = PublicationId.from_proto(request.publication)
        state = self._publishing.state.advance(publication, Phase.PREPARE)
        if state is self._publishing.state and self._publishing.prepared is not None:
            return self._publishing.prepared
        key = CallKey("PreparePublication", pb.PrepareSendResponse, (publication,))
        reason = f"publication {publication.key} replaces it"
        return await self._take_over(key, lambda: self._prepare(request, state), reason)

    async def _prepare(self, request: pb.PrepareSendRequest, state: PublicationState) -> pb.PrepareSendResponse:
        publishing = self._publishing = PublicationProgress(state)
        method = TrainerRpc.PreparePublication
        publishing.prepared = await self._phase(publishing, method, request, DEADLINES_S[method.key])
        return publishing.prepared

    async def TransferPublication(self, request: pb.TransferSendRequest, context: Context) -> pb.TransferSendResponse:
        job = self._configured_for(request.publication.job_id)
        publication, publishing = PublicationId.from_proto(request.publication), self._publishing
        state = publishing.state.advance(publication, Phase.TRANSFER)
        if publishing.sent is not None:
            return publishing.sent
        key = CallKey("TransferPublication", pb.TransferSendResponse, (publication,))
        return await self._lock.run(key, lambda: self._transfer(request, publishing, state, job))

    async def _transfer(
        self,
        request: pb.TransferSendRequest,
        publishing: PublicationProgress,
        state: PublicationState,
        job: ConfiguredJob,
    ) -> pb.TransferSendResponse:
        publishing.state = state
        deadline_s = job.deadline("TransferPublication") + ENDS_S
        publishing.sent = await self._phase(publishing, TrainerRpc.TransferPublication, request, deadline_s)
        self._on_sent(publishing.sent.report)
        return publishing.sent

    async def FinishPublication(self, request: pb.FinishSendRequest, context: Context) -> pb.FinishSendResponse:
        publication, publishing = PublicationId.from_proto(request.publication), self._publishing
        if not request.failure:
            for phase in (Phase.VERIFY, Phase.COMMIT):
                publishing.state = publishing.state.advance(publication, phase)
        elif publication == publishing.state.publication:
            await self._end_transfer(request.failure)
            publishing.state = publishing.state.fail()
        else:
            return pb.FinishSendResponse()
        await asyncio.to_thread(self._sender.finish, failed=bool(request.failure))
        return pb.FinishSendResponse()

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        job = self._configured_for(request.job_id)
        arguments = (request.job_id, request.path, request.huggingface, job.version)
        key = CallKey("Save", pb.SaveResponse, arguments)
        saving = self._saving
        if saving is not None and saving.key == key and not saving.outcome.done():
            return saving.answer
        drains = self._lock.open_to == key.method
        if drains:
            self._save_asked.set()
        return await self._lock.run(key, lambda: self._save(request, job, key), wait=drains)

    async def _save(
        self, request: pb.SaveRequest, job: ConfiguredJob, key: CallKey[pb.SaveResponse]
    ) -> pb.SaveResponse:
        await self._saved()
        answer = await self._on_ranks(TrainerRpc.Save, request, job.deadline("Save"))
        job.saved = job.version
        self._saving = SaveProgress(key, request.job_id, request.path, answer, self._saves.outcome)
        return answer

    async def FinishSave(self, request: pb.FinishSaveRequest, context: Context) -> pb.FinishSaveResponse:
        if self._runs("Save", request.job_id, request.path):
            await self._lock.wait_until_free()
        saving = self._saving
        if saving is None or (saving.job_id, saving.path) != (request.job_id, request.path):
            raise NotFound(f"{self._member_id} began no checkpoint at {request.path}.", "ask it to save there.")
        return await asyncio.shield(asyncio.wrap_future(saving.outcome))

    async def _saved(self) -> None:
        """Waits until a save in progress has succeeded or failed; it has its own deadline."""
        if self._saving is not None:
            outcome = asyncio.wrap_future(self._saving.outcome)
            await asyncio.wait([outcome])
            outcome.exception()  # FinishSave reports it

    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        job = self._configured_for(request.job_id)

        async def load() -> pb.LoadResponse:
            await self._saved()
            self._job = None  # after a failure the trainer has to be configured again
            reply = await self._on_ranks(TrainerRpc.Load, request, job.deadline("Load"))
            job.hold(Version(reply.version))
            self._job = job
            return reply

        return await self._lock.run(CallKey("Load", pb.LoadResponse, (request.job_id, request.path)), load)

    async def CopyState(self, request: pb.CopyStateRequest, context: Context) -> pb.CopyStateResponse:
        job, method = self._configured_for(request.job_id), TrainerRpc.CopyState
        if request.version != job.version:
            what = f"version {request.version} of {job.job_id} cannot be copied: the trainer holds {job.version}."
            raise Fenced(what, "ask for a copy of that version.")
        key = CallKey(method.name, pb.CopyStateResponse, (request.job_id, request.version, *request.receivers))
        return await self._lock.run(key, lambda: self._on_ranks(method, request, job.deadline(method.name)))

    async def ReceiveState(self, request: pb.ReceiveStateRequest, context: Context) -> pb.ReceiveStateResponse:
        job, method = self._configured_for(request.job_id), TrainerRpc.ReceiveState
        if request.configuration != job.configuration:
            what = f"{self._member_id} holds {job.job_id} from another loading than the copy is for."
            raise Fenced(what, "ask GetStatus from which one.")
        if request.version == job.version:
            return pb.ReceiveStateResponse(version=job.version)

        async def receive() -> pb.ReceiveStateResponse:
            try:
                reply = await self._on_ranks(method, request, job.deadline(method.name))
            except (PartialStep, OutOfMemory):
                self._job = None  # as on the ranks
                raise
            job.hold(Version(reply.version))
            return reply

        key = CallKey(method.name, pb.ReceiveStateResponse, (request.version, request.rendezvous.key))
        return await self._lock.run(key, receive, wait=True)

    async def GetStatus(self, request: pb.TrainerStatusRequest, context: Context) -> pb.TrainerStatus:
        job = self._job
        return pb.TrainerStatus(
            member_id=self._member_id,
            state=self._state(),
            job_id=job.job_id if job else "",
            version=self.version,
            world_size=self._world_size,
            backend=job.spec.trainer.backend if job else "",
            failure=self._failure,
            configuration=job.configuration if job else "",
            microbatches_at_once=job.microbatches_at_once if job else 0,
        )

    def _state(self) -> pb.TrainerState:
        if self._failure:
            return pb.TRAINER_STATE_FAILED
        if self._lock.current is not None:
            return WORK[self._lock.current.key.method][0]
        return pb.TRAINER_STATE_READY if self._job else pb.TRAINER_STATE_IDLE

    def _configured_for(self, job_id: str) -> ConfiguredJob:
        if self._job is None or self._job.job_id != job_id:
            what = f"the trainer holds {self._job.job_id if self._job else 'no job'}, not {job_id}."
            raise Fenced(what, "configure it for that job first.")
        return self._job

    def _runs(self, method: str, *first: object) -> bool:
        """Whether the ranks work on a call of this method whose first arguments are these."""
        current = self._lock.current
        return current is not None and current.key.method == method and current.key.arguments[: len(first)] == first

    async def _phase(
        self, publishing: PublicationProgress, method: Unary[Request, Response], request: Request, deadline_s: float
    ) -> Response:
        """Runs a phase on the ranks. If it fails, the publication has failed."""
        try:
            return await self._on_ranks(method, request, deadline_s)
        except MillraceError:
            publishing.state = publishing.state.fail()
            raise

    async def _take_over(self, key: CallKey[Result], work: Callable[[], Awaitable[Result]], reason: str) -> Result:
        """Runs `work` next: ends a transfer in progress for that `reason`, and waits for any other call."""
        await self._end_transfer(reason)
        return await self._lock.run(key, work, wait=True)

    async def _end_transfer(self, reason: str) -> None:
        """Aborts a transfer in progress and waits until the ranks are free."""
        if self._runs("TransferPublication"):
            await asyncio.to_thread(self._sender.abort, reason)
            await self._lock.wait_until_free()

    async def _on_ranks(self, method: Unary[Request, Response], request: Request, deadline_s: float) -> Response:
        """Runs a command on the ranks. If the ranks cannot continue, neither can this process."""
        try:
            with span(WORK[method.name][1], detail=method.name) as working:
                step = request.part if isinstance(request, pb.AddPartRequest) else request
                if isinstance(step, pb.StepRequest) and current() is not None:
                    step.traceparent = working.context.traceparent
                return await asyncio.to_thread(self._ranks.call, method, request, deadline_s)
        except RanksFailed as error:
            self._failure = self._lock.closed = str(error)
            self._on_failed(self._failure)
            if error.cause is not None:
                raise error.cause from None
            raise
