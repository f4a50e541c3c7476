"""What the Trainer service has loaded and is in the middle of: a job with its steps, a publication, a save."""

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import Fenced
from millrace.ids import JobId, Version
from millrace.spec import JobSpec
from millrace.weights.phases import PublicationState
from services.trainer.service.call_lock import CallKey


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
    parts: list[bytes] = field(default_factory=list)
    """What was added to the next step, part by part, see `content_of`."""

    def deadline(self, method: str) -> float:
        return self.spec.deadlines.of_calls()[f"Trainer/{method}"]

    def check_next(self, step: int) -> None:
        """Raises Fenced where the step is not the one after the version that is held."""
        if step != self.version + 1:
            raise Fenced(
                f"step {step} of {self.job_id} is not the next: the trainer holds version {self.version}.",
                f"ask for step {self.version + 1}, or load the checkpoint that step {step} follows.",
            )

    def check_parts(self, request: pb.StepRequest) -> None:
        """Raises Fenced where the parts that the request follows are not those that the trainer has."""
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
