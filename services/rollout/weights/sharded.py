"""One engine worker's part in sharded publications: what it wants, receiving it, putting it in place; and sending it on
to siblings that join.

The same code runs inside vLLM's worker processes and inside the `transformers` engine.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil
import torch

from millrace.errors import PublicationFailed
from millrace.weights.loader.watch import Load, Watched, watch
from millrace.weights.plans import wire_layouts as wire
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.pipeline import ReceivedMessages, ReceivePipeline, SendPipeline, TransferTimes
from millrace.weights.transfer.session import PublicationSession
from services.rollout.weights.transfer_request import TransferRequest

Result = TypeVar("Result")
Sent = tuple[Mapping[int, int], TransferTimes]
SPARE = 0.8
"""Of the free memory, how much staging may take."""
NAMED = 64
"""So many tensors are reported by name."""


@dataclass(frozen=True)
class Placed:
    """One worker's part of a swap."""

    apply_s: float
    compare_s: float
    loader_tensors: int
    loader_bytes: int
    staging_bytes: int
    loader_names: tuple[str, ...]
    """The first NAMED of them."""


class Passage(Generic[Result]):
    """One rank's part of a transfer, carried out in a thread of its own."""

    def __init__(
        self,
        transfer_request: TransferRequest,
        rank: int,
        work: Callable[[Channel], Result],
        device: torch.device,
        session: PublicationSession,
    ) -> None:
        self.request = transfer_request
        self.result: Result | None = None
        self.failure: str | None = None
        self._work = work
        self._session = session
        self._rendezvous = Rendezvous(
            transfer_request.host,
            transfer_request.port,
            transfer_request.communicator,
            rank,
            transfer_request.world_size,
            transfer_request.nccl_id,
            device,
            transfer_request.timeout_s,
        )
        self._give_up = time.monotonic() + transfer_request.timeout_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        session.begin()

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._carry_out, name=f"passage {self.request.key}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the last byte is over, or never will be: see `failure`."""
        return self._over.is_set()

    def wait(self, at_most_s: float | None = None) -> None:
        """Blocks until `done`."""
        self._over.wait(at_most_s)

    def close(self) -> None:
        """Ends what is under way; returns once nothing reads or writes any more."""
        if not self._over.is_set():
            self.failure = self.failure or f"publication {self.request.key} was aborted."
            if self._thread is not None:  # otherwise nothing began, and the communicator is as good as before
                self._session.fail("a replica was told to abort")
                self._thread.join()
            self._over.set()

    def _carry_out(self) -> None:
        try:
            self.result = self._session.run(self._rendezvous, self.request.key, self._give_up, self._work)
        except PublicationFailed as error:
            self.failure = self.failure or error.what
        finally:
            if self.request.leave_after:
                self._session.leave()
            self._over.set()


class Coming(Passage[ReceivedMessages]):
    def __init__(
        self, transfer_request: TransferRequest, rank: int, receiving: ReceivePipeline, session: PublicationSession
    ) -> None:
        super().__init__(transfer_request, rank, receiving.run, receiving.device, session)
        self.receiving = receiving


class Going(Passage[Sent]):
    """Everything that takes a while is done in its thread: the engine generates meanwhile."""

    def __init__(self, transfer_request: TransferRequest, rank: int, memory: Memory) -> None:
        super().__init__(transfer_request, rank, self._send, memory.device, PublicationSession())
        self.slot_bytes = 0
        self._rank = rank
        self._memory = memory

    def _send(self, channel: Channel) -> Sent:
        assert self.request.sides is not None
        plan = wire.Planner().plan(self.request.manifest, self.request.sides)
        device = self._memory.device
        # A new thread is on the first GPU, whichever its engine is on.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            sending = SendPipeline(plan, self._rank, self._memory)
            self.slot_bytes = sending.slot_bytes
            return sending.run(channel)


class Shards:
    """What one worker keeps from version to version: its layout, the plan, slots or staging, the communicator."""

    def __init__(self, load: Load, parameters: Mapping[str, torch.Tensor], padded: frozenset[str]) -> None:
        """As those of `staging.Shelf`."""
        self._load = load
        self._parameters = parameters
        self._padded = padded
        self._session = PublicationSession()
        self._planner = wire.Planner()
        self._watched: tuple[bytes, Watched] | None = None
        self._receiving: tuple[tuple[bytes, int, bool], ReceivePipeline] | None = None
        """Of a plan, as one of its ranks: replicas with one layout change places and keep the plan."""
        self._coming: Coming | None = None
        """The last one."""
        self._placed = ""
        """The publication that the layout's buffers hold whole."""

    def boxes(self, manifest: Manifest) -> Boxes:
        """What this worker wants of it."""
        return self._watch(manifest).memory.layout.boxes

    def _watch(self, manifest: Manifest) -> Watched:
        if self._watched is None or self._watched[0] != manifest.hash:
            self._let_go()
            self._placed = ""
            self._watched = (manifest.hash, watch(self._load, manifest, self._parameters, self._padded))
        return self._watched[1]

    def fits(self, transfer_request: TransferRequest, rank: int) -> bool:
        """Checks a coming transfer; whether there is memory to stage it. Raises PublicationFailed where it was planned
        for another worker than this."""
        assert transfer_request.sides is not None
        if transfer_request.already_joined and self._session.key != transfer_request.communicator:
            raise PublicationFailed(f"rank {rank} is not in communicator {transfer_request.communicator} any more.")
        plan, watched = self._plan(transfer_request), self._watch(transfer_request.manifest)
        if self._receiving is not None and self._receiving[0] == (plan.hash, rank, True):
            return True
        receivers = wire.decode(transfer_request.sides.receivers)
        senders = transfer_request.world_size - len(receivers)
        if (
            not 0 <= rank - senders < len(receivers)
            or receivers[rank - senders].hash != watched.memory.layout.boxes.hash
        ):
            raise PublicationFailed(f"rank {rank} wants other boxes than the publication was planned for.")
        if self._receiving is not None and self._receiving[0][:2] != (plan.hash, rank):
            self._let_go()  # or its memory would count as taken
        needed = int(plan.sizes[plan.contents_of(rank)].sum())
        return needed < SPARE * _free_bytes(watched.memory.device)

    def _plan(self, transfer_request: TransferRequest) -> ShardedPlan:
        assert transfer_request.sides is not None
        return self._planner.plan(transfer_request.manifest, transfer_request.sides)

    def prepare(self, transfer_request: TransferRequest, rank: int, *, staged: bool) -> Coming:
        """Makes slots or staging ready."""
        plan, memory = self._plan(transfer_request), self._watch(transfer_request.manifest).memory
        wanted = (plan.hash, rank, staged)
        if self._coming is not None and self._coming.failure is not None and memory.device.type == "cpu":
            self._let_go()  # what Gloo was asked for may still be written there
        if self._receiving is None or self._receiving[0] != wanted:
            self._let_go()  # before new memory is taken
            try:
                self._receiving = (wanted, ReceivePipeline(plan, rank, memory, staged=staged))
            except RuntimeError as error:  # torch's out of memory
                what = f"there is no memory to receive {transfer_request.key}: {error}"
                raise PublicationFailed(what, 'set publication.commit to "inplace".') from error
        self._coming = Coming(
            transfer_request,
            rank,
            self._receiving[1],
            PublicationSession() if transfer_request.leave_after else self._session,
        )
        return self._coming

    def place(self, coming: Coming, *, staged: bool) -> Placed:
        """Puts a received version in place and compares it there. Only while generation is paused."""
        watched, self._placed = self._watch(coming.request.manifest), ""
        apply_s, compare_s = coming.receiving.apply() if staged else (0.0, 0.0)
        began = time.perf_counter()
        with torch.no_grad():
            for fill in watched.fills:
                fill()
            if watched.whole:
                self._load(iter(watched.whole.items()))
        apply_s += time.perf_counter() - began
        slots, self._placed = coming.receiving.slot_bytes, coming.request.key
        names = tuple(itertools.islice(watched.whole, NAMED))
        return Placed(apply_s, compare_s, len(watched.whole), watched.whole_bytes, slots, names)

    def source(self, transfer_request: TransferRequest, rank: int, served: str) -> Memory:
        """What publication `served` put in place, to be sent. Raises PublicationFailed where that is not here as it was
        published, and where the copy was planned for another worker than this."""
        assert transfer_request.sides is not None
        watched, senders = self._watch(transfer_request.manifest), wire.decode(transfer_request.sides.senders)
        if watched.whole and self._placed != served:
            names = ", ".join(list(watched.whole)[:3])
            raise PublicationFailed(f"{names} are held only as the engine changed them.", "the trainer sends them.")
        if not 0 <= rank < len(senders) or senders[rank].hash != watched.memory.layout.boxes.hash:
            raise PublicationFailed(f"rank {rank} holds other boxes than the copy was planned for.")
        return watched.memory

    def leave(self) -> None:
        """The communicator is closed and memory given back."""
        self._session.leave()
        self._let_go()

    def _let_go(self) -> None:
        """Slots or staging are freed: at once, or when what is under way in them ends."""
        self._receiving = self._coming = None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)
