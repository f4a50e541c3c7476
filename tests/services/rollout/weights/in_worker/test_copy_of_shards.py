"""A worker's parameters sent on to a sibling: bit for bit what the trainer would have sent, for parameters as engines
have them (fused, padded, tied, experts over workers, two tensors changed by the loader)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed import TCPStore

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Content
from millrace.weights.transfer.store import serve_store
from services.rollout.weights.in_worker.model import WorkerLayout
from services.rollout.weights.in_worker.receiver import OutgoingTransfer
from services.rollout.weights.in_worker.sharded import IncomingShards, ShardedPath
from services.rollout.weights.transfer_request import TransferRequest
from tests.services.rollout.weights.in_worker.models import LoaderModel
from tests.shard_sender import Shards as TrainerRanks
from tests.shard_sender import ShardSender
from tests.weights.loader.test_learn import MANIFEST, Worker, tensors


class Replica:
    """An engine's workers, each with its part."""

    def __init__(self, workers: int) -> None:
        self.workers = [Worker(rank, workers) for rank in range(workers)]
        models = [LoaderModel(worker.load, worker.parameters, frozenset({"embed"})) for worker in self.workers]
        self.layouts = [WorkerLayout(model) for model in models]
        self.paths = [ShardedPath(model, layout) for model, layout in zip(models, self.layouts, strict=True)]
        self.served = ""

    @property
    def boxes(self) -> list[Boxes]:
        return [layout.boxes(MANIFEST) for layout in self.layouts]

    def make_ready(self, request: TransferRequest, *, shadow: bool) -> list[IncomingShards]:
        return [path.transfer(request, request.first_rank + i, shadow=shadow) for i, path in enumerate(self.paths)]

    def place(self, incoming: Sequence[IncomingShards], served: str) -> dict[int, int]:
        """Places what came, once it is whole; its checksums."""
        received = [one.wait(60) for one in incoming]
        self.placed = [one.place() for one in incoming]
        self.served = served
        return {number: value for worker in received if worker for number, value in worker.checksums}

    def holds(self, other: "Replica") -> bool:
        return all(
            torch.equal(parameter, there.parameters[name])
            for here, there in zip(self.workers, other.workers, strict=True)
            for name, parameter in here.parameters.items()
        )


Make = Callable[..., Replica]


@pytest.fixture
def replica() -> Iterator[Make]:
    made: list[Replica] = []

    def make(workers: int = 1) -> Replica:
        made.append(Replica(workers))
        return made[-1]

    yield make
    for one in made:
        for path in one.paths:
            path.leave()


def published(*replicas: Replica, version: int, shadow: bool = True) -> None:
    """Publishes a version from a trainer of two ranks to replicas in this order."""
    wanted = [boxes for replica in replicas for boxes in replica.boxes]
    sender = ShardSender(TrainerRanks(tensors(version)), wanted, version=version)
    incoming, first = [], sender.request.first_rank
    for replica in replicas:
        incoming.append(replica.make_ready(replace(sender.request, first_rank=first), shadow=shadow))
        first += len(replica.workers)
    sender.start()
    for one in [one for each in incoming for one in each]:
        one.begin()
    for replica, each in zip(replicas, incoming, strict=True):
        replica.place(each, sender.request.key)
    sender.join()


@dataclass
class Copy:
    """One copy: its two ends and what they are told."""

    source: Replica
    target: Replica
    store: TCPStore
    outgoing: TransferRequest
    incoming: TransferRequest

    @classmethod
    def of(cls, source: Replica, target: Replica, timeout_s: float = 120.0) -> "Copy":
        sides = weights_pb2.Sides(
            senders=wire_layouts.encode(source.boxes), receivers=wire_layouts.encode(target.boxes), message_bytes=512
        )
        plan = wire_layouts.Planner().plan(MANIFEST, sides)
        assert plan.rounds > 2
        store, port = serve_store("127.0.0.1", plan.world_size, timeout_s)
        outgoing = TransferRequest(
            key="job-test/1/2/3",
            version=Version(1),
            manifest=MANIFEST,
            host="127.0.0.1",
            port=port,
            world_size=plan.world_size,
            first_rank=0,
            timeout_s=timeout_s,
            path=weights_pb2.PATH_SHARDED,
            layouts=sides,
            communicator="job-test/1/2/3/x",
            leave_after=True,
        )
        return cls(source, target, store, outgoing, replace(outgoing, first_rank=len(source.workers)))

    def begin(self) -> list[OutgoingTransfer]:
        """The senders, under way."""
        layouts = enumerate(self.source.layouts)
        memories = [layout.sender_memory(self.outgoing, rank, self.source.served) for rank, layout in layouts]
        outgoing = [OutgoingTransfer(self.outgoing, rank, memory) for rank, memory in enumerate(memories)]
        for one in outgoing:
            one.begin()
        return outgoing

    def run(self, *, shadow: bool) -> None:
        incoming, outgoing = self.target.make_ready(self.incoming, shadow=shadow), self.begin()
        for one in incoming:
            one.begin()
        got = self.target.place(incoming, self.incoming.key)
        sent: dict[int, int] = {}
        for one in outgoing:
            result = one.wait(60)
            assert result is not None
            sent |= dict(result.checksums)
        assert {number: sent[number] for number in got} == got


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize(("workers", "others"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_a_copy_is_what_the_trainer_would_have_sent(replica: Make, workers: int, others: int, shadow: bool) -> None:
    source, target, oracle = replica(workers), replica(others), replica(others)
    published(source, version=1, shadow=shadow)
    published(oracle, version=1)
    Copy.of(source, target).run(shadow=shadow)
    assert target.holds(oracle)
    assert {(placed.loader_names, placed.loader_tensors) for placed in target.placed} == {(("norm", "bias"), 2)}
    published(target, version=2)
    published(oracle, version=2)
    assert target.holds(oracle), "the next version comes from the trainer again"


def test_what_was_copied_can_be_copied_on(replica: Make) -> None:
    first, second, third = replica(1), replica(1), replica(1)
    published(first, version=1)
    Copy.of(first, second).run(shadow=True)
    Copy.of(second, third).run(shadow=False)
    assert third.holds(first)


def test_tensors_that_the_engine_changed_are_no_source_after_another_path(replica: Make) -> None:
    source, target = replica(1), replica(1)
    published(source, version=1)
    copy = Copy.of(source, target)
    source.served = "job-test/1/1/9"  # a gather and broadcast, of which the layout knows nothing
    with pytest.raises(PublicationFailed, match="norm, bias are held only as the engine changed them"):
        copy.begin()
    other = replace(
        copy.outgoing, layouts=weights_pb2.Sides(senders=wire_layouts.encode([]), receivers=wire_layouts.encode([]))
    )
    source.served = source.layouts[0].holds(Content.MODEL)
    with pytest.raises(PublicationFailed, match="planned for"):
        source.layouts[0].sender_memory(other, 0, source.served)


def test_a_copy_that_is_ended_frees_both_ends_at_once(replica: Make) -> None:
    source, target = replica(1), replica(1)
    published(source, version=1)
    copy = Copy.of(source, target)
    (incoming,), (outgoing,) = target.make_ready(copy.incoming, shadow=True), copy.begin()
    until = time.monotonic() + 60.0
    while outgoing.session._failure_signal is None and time.monotonic() < until:  # before that nobody could hear it
        time.sleep(0.01)
    began = time.monotonic()
    outgoing.close()  # it waits for the sibling
    with pytest.raises(PublicationFailed, match="was aborted"):
        outgoing.wait(0)
    incoming.begin()
    with pytest.raises(PublicationFailed):
        incoming.wait(60.0)
    assert time.monotonic() - began < 60.0
    published(source, version=2)
    published(target, version=2)
    assert target.holds(source), "both go on"


def test_replicas_with_one_layout_may_change_places(replica: Make) -> None:
    one, two, oracle = replica(1), replica(1), replica(1)
    published(one, two, version=1)
    published(two, one, version=2)
    published(oracle, version=2)
    assert one.holds(oracle) and two.holds(oracle)
