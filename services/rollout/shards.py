"""One engine worker's part in sharded publications: what it wants, receiving it, putting it in place.

The same code runs inside vLLM's worker processes and inside the `transformers` engine.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from millrace.errors import PublicationFailed
from millrace.weights import sides as wire
from millrace.weights.boxes import Boxes
from millrace.weights.channels.meeting import Meeting
from millrace.weights.manifest import Manifest
from millrace.weights.party import Party
from millrace.weights.pipeline import Receiving, Reception
from millrace.weights.sharded import ShardedPlan
from millrace.weights.watch import Load, Watched, watch
from services.rollout.delivery import Delivery

SPARE = 0.8
"""Of the free memory, how much staging may take."""


@dataclass(frozen=True)
class Placed:
    """One worker's part of a swap."""

    apply_s: float
    compare_s: float
    loader_tensors: int
    loader_bytes: int
    staging_bytes: int


class Coming:
    """One delivery on its way, received in a thread of its own."""

    def __init__(self, delivery: Delivery, rank: int, receiving: Receiving, party: Party) -> None:
        self.delivery = delivery
        self.receiving = receiving
        self.reception: Reception | None = None
        self.failure: str | None = None
        self._party = party
        self._meeting = Meeting(
            delivery.host,
            delivery.port,
            delivery.channel,
            rank,
            delivery.world_size,
            delivery.nccl_id,
            receiving.device,
            delivery.timeout_s,
        )
        self._give_up = time.monotonic() + delivery.timeout_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        party.begin()

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._receive, name=f"receive {self.delivery.key}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the last byte is here, or never will be: see `failure`."""
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()

    def close(self) -> None:
        """Ends what is under way; returns once nothing writes any more."""
        if not self._over.is_set():
            self.failure = self.failure or f"publication {self.delivery.key} was aborted."
            self._party.fail("a receiver was told to abort")
            if self._thread is not None:
                self._thread.join()
            self._over.set()

    def _receive(self) -> None:
        try:
            run = self.receiving.run
            self.reception = self._party.run(self._meeting, self.delivery.key, self._give_up, run)
        except PublicationFailed as error:
            self.failure = self.failure or error.what
        finally:
            self._over.set()


class Shards:
    """What one worker keeps from version to version: its layout, the plan, slots or staging, the communicator."""

    def __init__(self, load: Load, parameters: Mapping[str, torch.Tensor], padded: frozenset[str]) -> None:
        """As those of `staging.Shelf`."""
        self._load = load
        self._parameters = parameters
        self._padded = padded
        self._party = Party()
        self._planner = wire.Planner()
        self._watched: tuple[bytes, Watched] | None = None
        self._receiving: tuple[bytes, bool, Receiving] | None = None

    def boxes(self, manifest: Manifest) -> Boxes:
        """What this worker wants of it."""
        return self._watch(manifest).memory.layout.boxes

    def _watch(self, manifest: Manifest) -> Watched:
        if self._watched is None or self._watched[0] != manifest.hash:
            self._receiving = None
            self._watched = (manifest.hash, watch(self._load, manifest, self._parameters, self._padded))
        return self._watched[1]

    def fits(self, delivery: Delivery, rank: int) -> bool:
        """Checks a coming delivery; whether there is memory to stage it. Raises PublicationFailed where it was planned
        for another worker than this."""
        assert delivery.sides is not None
        watched, receivers = self._watch(delivery.manifest), wire.decode(delivery.sides.receivers)
        senders = delivery.world_size - len(receivers)
        if (
            not 0 <= rank - senders < len(receivers)
            or receivers[rank - senders].hash != watched.memory.layout.boxes.hash
        ):
            raise PublicationFailed(f"rank {rank} wants other boxes than the publication was planned for.")
        if delivery.standing and self._party.key != delivery.channel:
            raise PublicationFailed(f"rank {rank} is not in communicator {delivery.channel} any more.")
        plan = self._plan(delivery)
        held = self._receiving
        if held is not None and held[:2] == (plan.hash, True):
            return True
        needed = int(plan.sizes[plan.contents_of(rank)].sum())
        return needed < SPARE * _free_bytes(watched.memory.device)

    def _plan(self, delivery: Delivery) -> ShardedPlan:
        assert delivery.sides is not None
        return self._planner.plan(delivery.manifest, delivery.sides)

    def prepare(self, delivery: Delivery, rank: int, *, staged: bool) -> Coming:
        """Makes slots or staging ready."""
        plan, memory = self._plan(delivery), self._watch(delivery.manifest).memory
        if self._receiving is None or self._receiving[:2] != (plan.hash, staged):
            self._receiving = None  # before new memory is taken
            try:
                self._receiving = (plan.hash, staged, Receiving(plan, rank, memory, staged=staged))
            except RuntimeError as error:  # torch's out of memory
                what = f"there is no memory to receive {delivery.key}: {error}"
                raise PublicationFailed(what, 'set publication.commit to "inplace".') from error
        return Coming(delivery, rank, self._receiving[2], self._party)

    def place(self, coming: Coming, *, staged: bool) -> Placed:
        """Puts a received version in place and compares it there. Only while generation is paused."""
        watched = self._watch(coming.delivery.manifest)
        apply_s, compare_s = coming.receiving.apply() if staged else (0.0, 0.0)
        began = time.perf_counter()
        if watched.whole:
            with torch.no_grad():
                self._load(iter(watched.whole.items()))
        apply_s += time.perf_counter() - began
        slots = coming.receiving.slot_bytes
        return Placed(apply_s, compare_s, len(watched.whole), watched.whole_bytes, slots)

    def leave(self) -> None:
        """The communicator is closed and memory given back."""
        self._party.leave()
        self._receiving = None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
