"""What the Trainer service has loaded and is in the middle of: the one call that the ranks work on, a job with its
steps, a publication, a save."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from millrace.contracts.method import Unary
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import Fenced, InvalidState, Unavailable
from millrace.ids import JobId, Version
from millrace.spec import JobSpec
from millrace.telemetry.spans.kinds import SpanKind
from millrace.weights.phases import PublicationState

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


WORK = {
    "Configure": (pb.TRAINER_STATE_CONFIGURING, SpanKind.CONFIGURE),
    "Load": (pb.TRAINER_STATE_CONFIGURING, SpanKind.CONFIGURE),
    "AddPart": (pb.TRAINER_STATE_STEPPING, SpanKind.TRAIN),
    "Step": (pb.TRAINER_STATE_STEPPING, SpanKind.TRAIN),
    "DescribeWeights": (pb.TRAINER_STATE_PUBLISHING, SpanKind.PREPARE),
    "PreparePublication": (pb.TRAINER_STATE_PUBLISHING, SpanKind.PREPARE),
    "TransferPublication": (pb.TRAINER_STATE_PUBLISHING, SpanKind.TRANSFER),
    "Save": (pb.TRAINER_STATE_SAVING, SpanKind.CHECKPOINT),
    "CopyState": (pb.TRAINER_STATE_SAVING, SpanKind.CHECKPOINT),
    "ReceiveState": (pb.TRAINER_STATE_CONFIGURING, SpanKind.CONFIGURE),
}
"""State of the trainer while its ranks work on a call of each method, and the span of the call."""


class Ranks(Protocol):
    """Runs a command on every rank; blocks. See `services.trainer.ranks.commands.CommandSender`."""

    def call(self, method: Unary[Request, Response], request: Request, deadline_s: float) -> Response: ...


class Saves(Protocol):
    """What the ranks write in the background. See `services.trainer.checkpoints.background_saver.BackgroundSaver`."""

    outcome: Future[pb.FinishSaveResponse]
    """Outcome of the newest save."""


@dataclass(frozen=True)
class CallKey(Generic[Result_co]):
    """Identifies a call: calls with equal keys do the same and have the same result."""

    method: str
    """Name of the remote method."""
    result: type[Result_co]
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class RunningCall:
    """The call that the ranks work on."""

    key: CallKey[object]
    task: asyncio.Task[object]


class CallLock:
    """Lets one call at a time use the ranks."""

    def __init__(self) -> None:
        self.current: RunningCall | None = None
        self.closed = ""
        """Why no new call may begin; empty while calls may begin."""
        self.open_to = ""
        """The method of which calls may begin nevertheless."""

    async def run(self, key: CallKey[Result], work: Callable[[], Awaitable[Result]], *, wait: bool = False) -> Result:
        """Runs `work`, or joins the running call with the same key. The work continues when its callers have gone.

        While a call with another key runs, raises InvalidState, or waits for that call if `wait`. Raises Unavailable
        when no new call may begin.
        """
        while wait and self.current is not None and self.current.key != key:
            await self.wait_until_free()
        running = self.current
        if running is None or running.key != key:
            running = self._begin(key, work)
        result = await asyncio.shield(running.task)
        assert isinstance(result, key.result)
        return result

    async def wait_until_free(self) -> None:
        """Waits for the call that runs, whether it succeeds or fails."""
        if self.current is not None:
            await asyncio.wait([self.current.task])

    def _begin(self, key: CallKey[Result], work: Callable[[], Awaitable[Result]]) -> RunningCall:
        if self.closed and key.method != self.open_to:
            what = f"{key.method} cannot begin: {self.closed}."
            raise Unavailable(what, "wait until the trainer is in the fleet again.")
        if self.current is not None:
            what = f"{key.method} cannot begin: the trainer is busy with {self.current.key.method}."
            raise InvalidState(what, "ask GetStatus and wait until it is READY.")
        task = asyncio.ensure_future(self._run(work))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have gone
        self.current = RunningCall(key, task)
        return self.current

    async def _run(self, work: Callable[[], Awaitable[Result]]) -> object:
        try:
            return await work()
        finally:
            self.current = None


@dataclass
class ConfiguredJob:
    """The job that is loaded, and its progress."""

    job_id: JobId
    checkpoint: str
    configuration: str
    spec: JobSpec
    version: Version
    parameters: int
    warnings: tuple[str, ...]
    """Warnings about the ranks' layout over hosts."""
    microbatches_at_once: int
    """Micro-batches that keep all ranks busy."""
    last_step: tuple[int, pb.StepResponse] | None = None
    """Number of the last step, and its response."""
    saved: Version = field(init=False)
    """The version that was loaded, or saved since."""
    parts: list[bytes] = field(default_factory=list)
    """What was added to the next step, part by part, see `content_of`."""

    def __post_init__(self) -> None:
        self.saved = self.version

    def hold(self, version: Version) -> None:
        """Notes a version that the trainer did not train itself."""
        self.version, self.last_step, self.parts = version, None, []
        self.saved = version

    def deadline(self, method: str) -> float:
        return self.spec.deadlines.of_calls()[f"Trainer/{method}"]

    def check_next(self, step: int) -> None:
        """Raises Fenced if the step is not the one after the version that is held."""
        if step != self.version + 1:
            raise Fenced(
                f"step {step} of {self.job_id} is not the next: the trainer holds version {self.version}.",
                f"ask for step {self.version + 1}, or load the checkpoint that step {step} follows.",
            )

    def check_parts(self, request: pb.StepRequest) -> None:
        """Raises Fenced if the parts that the request follows are not those that the trainer has."""
        if len(self.parts) != request.part:
            what = f"part {request.part} of step {request.step} is not the next: the trainer has {len(self.parts)}."
            raise Fenced(what, "add the groups of the step from part 0 on.")


@dataclass
class PublicationProgress:
    """The newest publication, and the responses of its phases."""

    state: PublicationState = field(default_factory=PublicationState)
    prepared: pb.PrepareSendResponse | None = None
    sent: pb.TransferSendResponse | None = None


@dataclass(frozen=True)
class SaveProgress:
    """The newest save."""

    key: CallKey[pb.SaveResponse]
    job_id: str
    path: str
    answer: pb.SaveResponse
    outcome: Future[pb.FinishSaveResponse]


def content_of(part: pb.StepRequest) -> bytes:
    """What makes two requests for a part of a step the same."""
    bare = pb.StepRequest()
    bare.CopyFrom(part)
    bare.ClearField("traceparent")
    bare.ClearField("work_address")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()
