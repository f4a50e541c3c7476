"""A sharded version on its way into one worker: the worker receives the boxes that it wants, nothing is gathered.
And one rank's share of a transfer in either direction, in a thread of its own."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import psutil
import torch

from millrace.errors import PublicationFailed
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.plans.wire_layouts import Planner
from millrace.weights.transfer.channels.channel import Channel, MessageExchange
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.pipeline import ReceivedMessages, ReceivePipeline
from millrace.weights.transfer.session import PublicationSession
from services.rollout.weights.in_worker.model import WorkerLayout, WorkerModel, part_of
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Placed, Prepared, Received

Result = TypeVar("Result")


class TransferThread(Generic[Result]):
    """Runs `work` on the session's channel, from `begin` on; its deadline counts from here."""

    def __init__(
        self,
        request: TransferRequest,
        rank: int,
        work: Callable[[Channel], Result],
        device: torch.device,
        session: PublicationSession,
    ) -> None:
        """`device` holds the memory that `work` reads or writes."""
        self.request = request
        self.failure: PublicationFailed | None = None
        self._result: Result | None = None
        self._work = work
        self._session = session
        self._rendezvous = Rendezvous(
            request.host,
            request.port,
            request.communicator,
            rank,
            request.world_size,
            request.nccl_id,
            device,
            request.timeout_s,
        )
        self._deadline = time.monotonic() + request.timeout_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        session.begin()

    def begin(self) -> None:
        """Starts the thread and returns at once."""
        self._thread = threading.Thread(target=self._run, name=f"transfer {self.request.key}", daemon=True)
        self._thread.start()

    def wait(self, at_most_s: float | None = None) -> Result | None:
        """The work's result; None if it is not there in time. Raises PublicationFailed if the work failed."""
        if not self._over.wait(at_most_s):
            return None
        if self.failure is not None:
            raise self.failure.again()
        return self._result

    def close(self) -> None:
        """Ends the work if it is under way; returns when it reads and writes nothing any more."""
        if not self._over.is_set():
            self.failure = self.failure or self.request.aborted()
            if self._thread is not None:  # otherwise nothing began, and the communicator can still be used
                self._session.fail("a replica was told to abort")
                self._thread.join()
            self._over.set()

    def _run(self) -> None:
        try:
            self._result = self._session.run(self._rendezvous, self.request.key, self._deadline, self._work)
        except PublicationFailed as error:
            # A new one: an exception that was raised keeps the memory of the frames that it left.
            self.failure = self.failure or error.again()
        finally:
            if self.request.leave_after:
                self._session.leave()
            self._over.set()


Receive = Callable[[ReceivePipeline, MessageExchange], ReceivedMessages]
"""How a pipeline receives a version over a channel."""
SHADOW_SHARE = 0.8
"""Share of the free memory that a version may take in shadow."""


def receive_whole(pipeline: ReceivePipeline, channel: MessageExchange) -> ReceivedMessages:
    """Receives whole messages."""
    return pipeline.run(channel)


class IncomingShards(TransferThread[Received]):
    """See `IncomingTransfer`."""

    def __init__(
        self,
        request: TransferRequest,
        rank: int,
        pipeline: ReceivePipeline,
        session: PublicationSession,
        layout: WorkerLayout,
        model: WorkerModel,
        *,
        shadow: bool,
        receive: Receive = receive_whole,
    ) -> None:
        self.pipeline = pipeline
        self._layout = layout
        self._model = model
        self._shadow = shadow
        super().__init__(request, rank, partial(_received, receive, pipeline), pipeline.device, session)

    def place(self) -> Placed:
        """See `IncomingTransfer`. Without `shadow` the messages lie in place already, compared. What goes through the
        engine's loader is loaded here."""
        manifest = self.request.manifest
        learned = self._layout.of(manifest)
        self._layout.being_written(manifest)
        apply_s, compare_s = self.pipeline.apply() if self._shadow else (0.0, 0.0)
        began = time.perf_counter()
        with torch.no_grad():
            for write in learned.constant_writes:
                write()
            if learned.loader_tensors:
                part_of(self._model, manifest.content).load(iter(learned.loader_tensors.items()))
        apply_s += time.perf_counter() - began
        self._layout.written(manifest, self.request.key)
        return Placed(
            apply_s=apply_s,
            compare_s=compare_s,
            loader_tensors=len(learned.loader_tensors),
            loader_bytes=learned.loader_bytes,
            staging_bytes=self.pipeline.slot_bytes,
            loader_names=self._layout.loader_names(manifest),
        )


def _received(receive: Receive, pipeline: ReceivePipeline, channel: MessageExchange) -> Received:
    messages = receive(pipeline, channel)
    times = messages.times
    return Received(tuple(messages.sums.items()), times.wire_s, times.verify_s, times.code_s)


@dataclass(frozen=True)
class _Kept:
    """A pipeline that is kept for the next version."""

    made_for: tuple[bytes, int, bool]
    """Hash of the plan, rank in it, whether it receives in shadow. Replicas with equal layouts may exchange their ranks
    and keep the plan."""
    pipeline: ReceivePipeline


class ShardedPath:
    """See `IncomingPath`. Keeps the plan, the pipeline with its memory, and the communicator."""

    def __init__(self, model: WorkerModel, layout: WorkerLayout) -> None:
        self._model = model
        self._layout = layout
        self._session = PublicationSession()
        self._planner = Planner()
        self._kept: _Kept | None = None
        self._latest: IncomingShards | None = None

    def prepare(self, request: TransferRequest, rank: int) -> Prepared:
        if request.already_joined and self._session.key != request.communicator:
            raise PublicationFailed(f"rank {rank} is not in communicator {request.communicator} any more.")
        plan = self._plan(request)
        if self._kept is not None and self._kept.made_for[:2] != (plan.hash, rank):
            self._free()  # its memory would count as taken
        memory = self._layout.of(request.manifest).memory
        if self._kept is not None and self._kept.made_for == (plan.hash, rank, True):
            return Prepared(shadow_fits=True, inplace_possible=True)
        self._layout.check_receiver(request, rank)
        needed = int(plan.sizes[plan.contents_of(rank)].sum())
        return Prepared(needed < SHADOW_SHARE * free_bytes(memory.device), inplace_possible=True)

    def transfer(
        self, request: TransferRequest, rank: int, *, shadow: bool, receive: Receive = receive_whole
    ) -> IncomingShards:
        session = PublicationSession() if request.leave_after else self._session
        pipeline = self._pipeline(request, rank, shadow=shadow)
        self._latest = IncomingShards(
            request, rank, pipeline, session, self._layout, self._model, shadow=shadow, receive=receive
        )
        return self._latest

    def _pipeline(self, request: TransferRequest, rank: int, *, shadow: bool) -> ReceivePipeline:
        plan, memory = self._plan(request), self._layout.of(request.manifest).memory
        if self._latest is not None and self._latest.failure is not None and memory.device.type == "cpu":
            self._free()  # Gloo may still write what it was asked for before the failure
        wanted = (plan.hash, rank, shadow)
        if self._kept is None or self._kept.made_for != wanted:
            self._free()  # before new memory is taken
            try:
                pipeline = ReceivePipeline(plan, rank, memory, staged=shadow)
            except RuntimeError as error:  # torch's out of memory
                what = f"there is no memory to receive {request.key}: {error}"
                raise PublicationFailed(what, 'set publication.commit to "inplace".') from error
            self._kept = _Kept(wanted, pipeline)
        return self._kept.pipeline

    def _plan(self, request: TransferRequest) -> ShardedPlan:
        return self._planner.plan(request.manifest, request.layouts)

    def leave(self) -> None:
        """Leaves the communicator and frees the memory."""
        self._session.leave()
        self._free()

    def _free(self) -> None:
        """Frees the pipeline's memory: at once, or when the transfer that uses it ends."""
        self._kept = self._latest = None


def free_bytes(device: torch.device) -> int:
    """Memory that may be taken on a device. What torch's allocator keeps and does not use is free."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)
