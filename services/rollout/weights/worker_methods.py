"""The methods of the weight receiver inside each of an engine's workers, which the replica calls, and their answers.

`in_worker.receiver.WeightReceiver` implements the methods. Arguments and answers are bytes, strings, numbers, booleans
and dataclasses of them, so that `worker_rpc.py` can carry them between processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Protocol, Self

Checksums = tuple[tuple[int, int], ...]
"""Number of each message of the plan, and the checksum of its bytes."""


@dataclass(frozen=True)
class Described:
    """What one worker wants of a manifest."""

    boxes: bytes
    """The boxes that it wants, as `Boxes.encode` writes them."""
    untaken: tuple[int, ...] = ()
    """Tensors of the manifest for which this worker has no place."""


@dataclass(frozen=True)
class Prepared:
    """The ways in which a worker can receive a version."""

    shadow_fits: bool
    """There is memory to receive the version in spare memory."""
    inplace_possible: bool
    """Messages can be written to the parameters as they arrive."""


@dataclass(frozen=True)
class Figures:
    """What one worker did, or all of them."""

    @classmethod
    def of_all(cls, workers: Sequence[Self]) -> Self:
        """Of all workers of an engine: the largest of each number, and all that is in tuples."""
        values = {one.name: [getattr(worker, one.name) for worker in workers] for one in fields(cls)}
        return cls(**{name: (*chain(*of),) if isinstance(of[0], tuple) else max(of) for name, of in values.items()})


@dataclass(frozen=True)
class Received(Figures):
    """What one worker received, or all of them. Seconds of wall time, of the slowest worker."""

    checksums: Checksums
    """Number and checksum of every message. See `ExpectedMessages`."""
    wire_s: float
    """Time inside the channel's calls."""
    checksum_s: float
    code_s: float = 0.0
    """Time to decode messages if only changes travel."""


@dataclass(frozen=True)
class Placed(Figures):
    """How one worker put a version in place, or all of them. Each figure is that of the worker with the largest one;
    seconds are of wall time."""

    apply_s: float
    """Time to write the parameters."""
    compare_s: float
    """Time to compare the parameters bit for bit with what was received."""
    loader_tensors: int
    """Tensors that went whole through the engine's own loader."""
    loader_bytes: int = 0
    staging_bytes: int = 0
    """Memory that the transfer took in addition to the parameters."""
    loader_names: tuple[str, ...] = ()
    """Names of some of the loader's tensors."""
    unplaced: tuple[str, ...] = ()
    """Tensors of the manifest of which no worker's loader took anything."""

    @classmethod
    def of_all(cls, workers: Sequence[Self]) -> Self:
        """How all workers of an engine put a version in place."""
        return replace(
            super().of_all(workers),
            loader_names=max((worker.loader_names for worker in workers), key=len),
            unplaced=tuple(sorted(set.intersection(*(set(worker.unplaced) for worker in workers)))),
        )


@dataclass(frozen=True)
class Sent(Figures):
    """What one worker sent to siblings, or all of them. Seconds of wall time, of the slowest worker."""

    checksums: Checksums
    """Number and checksum of every message."""
    pack_s: float
    checksum_s: float
    slot_bytes: int
    """Memory that the sending took, of the worker where it took most."""


class WorkerMethods(Protocol):
    """The methods, in the order in which a publication calls them, and one that shows that the worker computes. Each
    raises PublicationFailed if it fails, and InvalidJob if the engine's model and the weights do not fit."""

    def describe(self, manifest: bytes) -> Described:
        """What this worker wants of a manifest."""

    def host(self) -> str:
        """The name of this worker's host, the same for all workers and trainer ranks there."""

    def prepare(self, request: bytes) -> Prepared | None:
        """Checks a coming transfer (`TransferRequest.encode`), and forgets an unfinished one. None if the request
        only names a plan that this worker does not know."""

    def make_ready(self, shadow: bool) -> None:
        """Makes memory ready for the transfer that was prepared: for a whole version, or for a few messages."""

    def begin(self) -> None:
        """Starts receiving in a thread and returns at once."""

    def wait_received(self) -> Received | None:
        """Waits a moment for the last byte; None if it is not there yet."""

    def place(self) -> Placed:
        """Puts the received version in place. Only while generation is paused."""

    def abort(self) -> None:
        """Ends what `prepare` began and frees its memory. Idempotent."""

    def checksums(self) -> dict[str, int]:
        """The checksum of each of the model's parameters, as it lies in this worker."""

    def prepare_send(self, request: bytes, served: str) -> bytes:
        """Checks that what publication `served` put in place can be sent. Answers NCCL's unique id if this rank has
        to make one."""

    def send(self, request: bytes) -> None:
        """Starts sending in a thread and returns at once."""

    def wait_sent(self) -> Sent | None:
        """Waits a moment for the last byte to be sent; None if it is not yet."""

    def end_send(self) -> None:
        """Ends what `prepare_send` began: nothing reads the parameters to send them after this. Idempotent."""

    def finish_batch(self) -> None:
        """Does nothing. Its answer shows that the thread that generates has come to the end of a batch."""


BETWEEN_BATCHES: frozenset[Callable[..., Any]] = frozenset(
    {WorkerMethods.describe, WorkerMethods.place, WorkerMethods.finish_batch}
)
"""Methods that only the thread that generates may call, between two batches: two run the model's own loader."""
