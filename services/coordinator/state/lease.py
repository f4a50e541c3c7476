"""A prompt in the queue and a lease on it, as rows in Redis and as messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import structlog
from google.protobuf.message import DecodeError

from millrace.contracts.trajectories import assembled
from millrace.contracts.v1 import work_pb2
from millrace.drops import Drop
from millrace.ids import Fence, JobId, LeaseId, PromptId, Purpose
from millrace.wire.enums import PURPOSE_NUMBERS, purpose_of

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class QueuedPrompt:
    """A prompt in the queue."""

    prompt_id: PromptId
    purpose: Purpose
    lease: work_pb2.Lease
    """What the replica is sent, still without `ref` and `expires_s`."""

    def encode(self) -> list[str | bytes]:
        """Fields of the prompt's entry in the Redis stream: name, value, name, value, ..."""
        return ["prompt", self.prompt_id, "purpose", self.purpose, "lease", self.lease.SerializeToString()]

    @classmethod
    def decode(cls, fields: Sequence[bytes]) -> Self:
        """The row whose `encode` gave these fields."""
        values = dict(zip(fields[::2], fields[1::2], strict=True))
        lease = work_pb2.Lease.FromString(values[b"lease"])
        return cls(PromptId(values[b"prompt"].decode()), Purpose(values[b"purpose"].decode()), lease)


@dataclass(frozen=True)
class DroppedPrompt:
    """A prompt that is dropped as soon as it is issued: its row of the data cannot be used."""

    prompt_id: PromptId
    drop: Drop


Draft = QueuedPrompt | DroppedPrompt
"""A prompt about to be issued."""


@dataclass(frozen=True)
class LeaseRef:
    """A claim on a prompt of one job, as LeaseRef in proto/millrace/v1/work.proto."""

    purpose: Purpose
    id: LeaseId
    fence: Fence

    @classmethod
    def of(cls, ref: work_pb2.LeaseRef) -> Self:
        """Raises InvalidState if the message names no known purpose."""
        return cls(purpose_of(ref.purpose), LeaseId(ref.lease_id), Fence(ref.fence))

    def message(self, job_id: JobId) -> work_pb2.LeaseRef:
        purpose = PURPOSE_NUMBERS[self.purpose]
        return work_pb2.LeaseRef(job_id=job_id, lease_id=self.id, fence=self.fence, purpose=purpose)


@dataclass(frozen=True)
class Claim:
    """A lease that was just given."""

    ref: LeaseRef
    row: QueuedPrompt
    parts: bytes = b""
    """What earlier holders sampled: a serialized LeaseParts."""

    def sampled(self) -> list[work_pb2.Part]:
        """The parts of the answers that earlier holders sampled; none if a holder sent what cannot be read."""
        try:
            return assembled(work_pb2.LeaseParts.FromString(self.parts).parts)
        except DecodeError as error:
            log.warning("parts of a lease cannot be read", prompt=self.row.prompt_id, error=str(error))
            return []
