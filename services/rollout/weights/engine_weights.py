"""The protocol between publications and an engine, and what the engine reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.contracts.v1 import weights_pb2
from millrace.ids import Version
from millrace.spec.rollout import CachePolicy
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Placed, Received, Sent


@dataclass(frozen=True)
class CommitReport:
    """How a version was put in place."""

    placed: Placed
    """What the engine's workers did for that."""
    pause_s: float
    """Seconds from the last token under the old version, or the order to pause if that came later, until generation
    could continue."""
    mode: "weights_pb2.CommitMode" = weights_pb2.COMMIT_MODE_SHADOW
    idle_ratio: float | None = None
    """Share of the time since the version before was put in place in which no sample was in the engine; None if there
    was no version before."""


class EngineWeights(Protocol):
    """An engine whose weights change by publications. All methods are called on one event loop and do not block it.

    Before the first `commit` the weights may not be served. A failed `commit` leaves no version in place: the caller
    serves nothing until a later one succeeds.
    """

    device: str
    """The device for people: cpu, or the name and number of the accelerators."""
    world_size: int
    """Workers that receive weights. Valid once the engine has started."""

    @property
    def generates_while_receiving(self) -> bool:
        """Whether what was prepared is received in spare memory: generation goes on, and an abort costs nothing."""

    @property
    def half_written(self) -> bool:
        """Whether an abort now leaves parameters of two versions: nothing may be served then until a later commit."""

    async def describe(self, manifest: Manifest) -> Sequence[Boxes]:
        """The boxes of the manifest that each worker wants; nothing if this engine cannot say. Raises InvalidJob if the
        manifest does not fit the engine's model."""

    async def hosts(self) -> Sequence[str]:
        """The name of each worker's host."""

    async def prepare_receive(self, request: TransferRequest) -> None:
        """Checks a coming version against the engine and makes memory ready for it. Raises PublicationFailed if it
        does not fit."""

    async def begin_receive(self) -> None:
        """Starts receiving the prepared transfer during generation; one that is put in place as it arrives pauses
        generation first. Returns at once."""

    async def received(self) -> Received:
        """Waits for the last byte. Raises PublicationFailed if it does not come."""

    async def commit(self, version: Version | None, cache_policy: CachePolicy) -> CommitReport:
        """Pauses, keeping requests in flight, puts what was received in place, compares, resumes. `version` is served
        from then on; None: nothing is, because what was received is only the base of an adapter. Raises InvalidJob
        if the engine's model has no place for a tensor."""

    async def abort_receive(self) -> None:
        """Ends what `prepare` began and frees its memory. Idempotent."""

    async def prepare_send(self, request: TransferRequest, served: str) -> bytes:
        """Prepares to send what publication `served` put in place, as the senders of `request`. Answers NCCL's unique
        id if the parameters are on GPUs. Raises PublicationFailed if some of it is not here as it was
        published."""

    async def send(self, request: TransferRequest) -> Sent:
        """Sends during generation; returns when the last byte is sent. Raises PublicationFailed if that fails, and
        if `end_send` comes first."""

    async def end_send(self) -> None:
        """Ends what `prepare_send` began: nothing reads the parameters for it after this. Idempotent."""
