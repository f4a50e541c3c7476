"""What an engine is to a replica: it generates samples, and receives versions beside that.

An engine is one class in one file of this package and one line in its registry (`__init__.py`). Everything an engine
library needs is imported inside the class's methods: importing its module costs nothing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.errors import MillraceError
from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.spec.rollout import CachePolicy
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from millrace.wire.v1 import common_pb2, weights_pb2
from services.rollout.weights.transfer_request import TransferRequest


class StopReason(Enum):
    """Why a sample ended. The values are those of the wire."""

    END_OF_TURN = common_pb2.STOP_REASON_END_OF_TURN
    """The model produced an end-of-turn token."""
    STOP_STRING = common_pb2.STOP_REASON_STOP_STRING
    """One of the stop strings appeared."""
    LENGTH = common_pb2.STOP_REASON_LENGTH
    """The response reached its limit, or prompt and response the engine's context."""


@dataclass(frozen=True)
class Sampling:
    max_response_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weights of `version`."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    tokens: NDArray[np.int32]
    """[tokens], the end-of-turn token included where the model produced one."""
    logprobs: NDArray[np.float32]
    """[tokens], nats, of the distribution sampled from: after temperature, top-k and top-p. Greedy samples carry the
    model's own (temperature 1)."""
    versions: tuple[VersionSpan, ...]
    """Contiguous, in order, covering every token."""
    stop_reason: StopReason
    text: str
    """Without special tokens, and without the stop string that ended it."""
    experts: NDArray[np.integer] | None = None
    """Where the job replays routers: [tokens, layers with experts, experts a token], of the first tokens of prompt and
    response; the last one may not have been sent to any."""


@dataclass(frozen=True)
class Reception:
    """How the bytes of one version came in."""

    checksums: tuple[int, ...]
    """Of each manifest tensor, in order, as it lies in staging memory of every engine worker."""
    wire_s: float
    """Inside the channel's calls, of the slowest worker."""
    checksum_s: float
    contents: tuple[tuple[int, int], ...] = ()
    """Of a sharded publication, instead: each content of the plan that a worker got, and its checksum; all workers'."""


@dataclass(frozen=True)
class Swap:
    """How a version was put in place. Seconds of wall time."""

    apply_s: float
    """Writing the engine's parameters, of the slowest worker."""
    compare_s: float
    """Comparing the parameters bit for bit with what was received, of the slowest worker."""
    pause_s: float
    """From the order to pause until generation could go on."""
    loader_tensors: int
    """Tensors that went whole through the engine's own loader."""
    loader_bytes: int = 0
    staging_bytes: int = 0
    """Memory that the transfer took beside the parameters, of the worker where it took most."""
    mode: weights_pb2.CommitMode = weights_pb2.COMMIT_MODE_SHADOW
    loader_names: tuple[str, ...] = ()
    """Some of the loader's tensors of a sharded publication."""


@dataclass(frozen=True)
class Dispatch:
    """How the version in place went to siblings. Seconds of the slowest worker."""

    contents: tuple[tuple[int, int], ...]
    """Each content of the plan, and its checksum; all workers'."""
    pack_s: float
    checksum_s: float
    slot_bytes: int
    """Memory that it took, of the worker where it took most."""


@dataclass(frozen=True)
class Load:
    """Samples in the engine now."""

    running: int
    waiting: int


class Engine(Protocol):
    """Generates and receives. All methods are called on one event loop and do not block it.

    Before the first `commit` the weights are not to be served. A failed `commit` leaves no version in place: the caller
    serves nothing until a later one succeeds. What fails for good raises EngineDied, and the process ends.
    """

    name: str
    release: str
    """Of the engine library."""
    device: str
    """For people: cpu, or the name and number of the accelerators."""
    world_size: int
    """Workers that receive weights. Valid once started, as are `dtype` and `capacity`."""
    dtype: str
    """Of the parameters, as torch names it."""
    capacity: int
    """Samples that it runs at once."""

    async def start(self, spec: JobSpec) -> None:
        """Loads the job's model, with weights of no meaning. Raises InvalidJob for what the job asks wrongly."""

    async def stop(self) -> None:
        """Ends every process and thread of the engine. Idempotent."""

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        """One sample. Cancelling the call aborts the request inside the engine. Raises InvalidState where no version is
        in place, or none was for a while since it began."""

    def load(self) -> Load: ...

    async def describe(self, manifest: Manifest) -> Sequence[Boxes]:
        """What each worker wants of a manifest; nothing where this engine cannot tell. Raises PublicationFailed where
        it does not fit."""

    async def prepare(self, transfer_request: TransferRequest) -> None:
        """Checks a coming version against the engine. Raises PublicationFailed where it does not fit."""

    async def begin_receive(self) -> None:
        """Starts receiving the prepared transfer into staging memory beside generation, or, for one that is put in
        place as it comes, pauses first. Returns at once."""

    @property
    def half_written(self) -> bool:
        """Whether an abort now leaves parameters of two versions: nothing may be served then until a later commit."""

    async def received(self) -> Reception:
        """Waits for the last byte. Raises PublicationFailed where it does not come."""

    async def commit(self, version: Version, cache_policy: CachePolicy) -> Swap:
        """Pauses, keeping requests in flight, puts the received version in place, compares, resumes."""

    async def abort_receive(self) -> None:
        """Forgets what `prepare` began and frees staging memory. Idempotent."""

    async def prepare_send(self, transfer_request: TransferRequest, served: str) -> bytes:
        """Makes ready to send what publication `served` put in place, as its senders; answers NCCL's id
        where the parameters lie on GPUs. Raises PublicationFailed where some of it is not here as it was published."""

    async def send(self, transfer_request: TransferRequest) -> Dispatch:
        """Sends beside generation; returns when the last byte is out. Raises PublicationFailed where that fails, and
        where `end_send` comes first."""

    async def end_send(self) -> None:
        """Forgets what `prepare_send` began: nothing reads the parameters for it after this. Idempotent."""


class EngineDied(MillraceError):
    """The engine's process or thread ended; the replica leaves the fleet and exits."""


@dataclass(frozen=True)
class Probe:
    """Whether an engine would run here."""

    ok: bool
    release: str
    """Empty where it is not installed."""
    why: str
    """Why not, with the fix; or a warning; or empty."""


def compute_threads() -> int:
    """Threads that an engine computes with on a CPU, unless OMP_NUM_THREADS says otherwise: one core is left to event
    loops and neighbours, since threads that wait for each other on a full host crawl."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def end_of_turn(named: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a response: those of the model folder's generation config, and the tokenizer's."""
    tokens = {named} if isinstance(named, int) else set(named or ())
    return sorted(tokens | {tokenizer.eos_token_id} - {None})
