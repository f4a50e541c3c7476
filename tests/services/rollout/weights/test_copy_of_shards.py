"""A worker's parameters sent on to a sibling: bit for bit what the trainer would have sent, for parameters as engines
have them (fused, padded, tied, experts over workers, two tensors changed by the loader)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed import TCPStore

from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.plans import wire_layouts as wire
from millrace.weights.transfer.channels.gloo import serve_store
from millrace.wire.v1 import weights_pb2
from services.rollout.weights.sharded import Coming, Going, Shards
from services.rollout.weights.transfer_request import TransferRequest
from tests.shard_sender import Shards as TrainerRanks
from tests.shard_sender import ShardSender
from tests.weights.loader.test_watch import MANIFEST, Worker, tensors


class Replica:
    """An engine's workers, each with its part."""

    def __init__(self, workers: int) -> None:
        self.workers = [Worker(rank, workers) for rank in range(workers)]
        self.shards = [Shards(worker.load, worker.parameters, frozenset({"embed"})) for worker in self.workers]
        self.served = ""

    @property
    def boxes(self) -> list:
        return [shards.boxes(MANIFEST) for shards in self.shards]

    def prepare(self, transfer_request: TransferRequest, *, staged: bool) -> list[Coming]:
        return [
            s.prepare(transfer_request, transfer_request.first_rank + i, staged=staged)
            for i, s in enumerate(self.shards)
        ]

    def place(self, coming: Sequence[Coming], *, staged: bool) -> dict[int, int]:
        """Once everything is here; the checksums of what came."""
        for one in coming:
            one.wait()
            assert one.failure is None, one.failure
        self.placed = [shards.place(one, staged=staged) for shards, one in zip(self.shards, coming, strict=True)]
        self.served = coming[0].request.key
        return {content: value for one in coming for content, value in one.result.sums.items()}

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
        for shards in one.shards:
            shards.leave()


def published(*replicas: Replica, version: int, staged: bool = True) -> None:
    """From a trainer of two ranks to replicas in this order."""
    wanted = [boxes for replica in replicas for boxes in replica.boxes]
    sender = ShardSender(TrainerRanks(tensors(version)), wanted, version=version)
    coming, first = [], sender.request.first_rank
    for replica in replicas:
        coming.append(replica.prepare(replace(sender.request, first_rank=first), staged=staged))
        first += len(replica.workers)
    sender.start()
    for one in [one for each in coming for one in each]:
        one.begin()
    for replica, each in zip(replicas, coming, strict=True):
        replica.place(each, staged=staged)
    sender.join()


@dataclass
class Copy:
    """What both ends of a copy are told."""

    source: Replica
    target: Replica
    store: TCPStore
    going: TransferRequest
    coming: TransferRequest

    @classmethod
    def of(cls, source: Replica, target: Replica, timeout_s: float = 20.0) -> "Copy":
        sides = weights_pb2.Sides(
            senders=wire.encode(source.boxes), receivers=wire.encode(target.boxes), message_bytes=512
        )
        plan = wire.Planner().plan(MANIFEST, sides)
        assert plan.rounds > 2
        store, port = serve_store("127.0.0.1", plan.world_size, timeout_s)
        going = TransferRequest(
            key="job-test/1/2/3",
            version=Version(1),
            manifest=MANIFEST,
            host="127.0.0.1",
            port=port,
            world_size=plan.world_size,
            first_rank=0,
            timeout_s=timeout_s,
            sides=sides,
            communicator="job-test/1/2/3/x",
            leave_after=True,
        )
        return cls(source, target, store, going, replace(going, first_rank=len(source.workers)))

    def begin(self) -> list[Going]:
        """The senders, under way."""
        rows = [s.source(self.going, rank, self.source.served) for rank, s in enumerate(self.source.shards)]
        going = [Going(self.going, rank, memory) for rank, memory in enumerate(rows)]
        for one in going:
            one.begin()
        return going

    def run(self, *, staged: bool) -> None:
        coming, going = self.target.prepare(self.coming, staged=staged), self.begin()
        for one in coming:
            one.begin()
        got = self.target.place(coming, staged=staged)
        sent: dict[int, int] = {}
        for one in going:
            one.wait()
            assert one.failure is None and one.result is not None, one.failure
            sent |= one.result[0]
        assert {content: sent[content] for content in got} == got


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize(("workers", "others"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_a_copy_is_what_the_trainer_would_have_sent(replica: Make, workers: int, others: int, staged: bool) -> None:
    source, target, oracle = replica(workers), replica(others), replica(others)
    published(source, version=1, staged=staged)
    published(oracle, version=1)
    Copy.of(source, target).run(staged=staged)
    assert target.holds(oracle)
    assert {(placed.loader_names, placed.loader_tensors) for placed in target.placed} == {(("norm", "bias"), 2)}
    published(target, version=2)
    published(oracle, version=2)
    assert target.holds(oracle), "the next version comes from the trainer again"


def test_what_was_copied_can_be_copied_on(replica: Make) -> None:
    first, second, third = replica(1), replica(1), replica(1)
    published(first, version=1)
    Copy.of(first, second).run(staged=True)
    Copy.of(second, third).run(staged=False)
    assert third.holds(first)


def test_tensors_that_the_engine_changed_are_no_source_after_another_path(replica: Make) -> None:
    source, target = replica(1), replica(1)
    published(source, version=1)
    copy = Copy.of(source, target)
    source.served = "job-test/1/1/9"  # a gather and broadcast, of which the shards know nothing
    with pytest.raises(PublicationFailed, match="norm, bias are held only as the engine changed them"):
        copy.begin()
    other = replace(copy.going, sides=weights_pb2.Sides(senders=wire.encode([]), receivers=wire.encode([])))
    source.served = source.shards[0]._placed
    with pytest.raises(PublicationFailed, match="planned for"):
        source.shards[0].source(other, 0, source.served)


def test_a_copy_that_is_ended_frees_both_ends_at_once(replica: Make) -> None:
    source, target = replica(1), replica(1)
    published(source, version=1)
    copy = Copy.of(source, target)
    (coming,), (going,) = target.prepare(copy.coming, staged=True), copy.begin()
    until = time.monotonic() + 20.0
    while going._session._failure_signal is None and time.monotonic() < until:  # before that there is nobody to hear it
        time.sleep(0.01)
    began = time.monotonic()
    going.close()  # it waits for the sibling
    assert "was aborted" in str(going.failure)
    coming.begin()
    coming.wait()
    assert coming.failure is not None and time.monotonic() - began < 3.0
    published(source, version=2)
    published(target, version=2)
    assert target.holds(source), "both go on"


def test_replicas_with_one_layout_may_change_places(replica: Make) -> None:
    one, two, oracle = replica(1), replica(1), replica(1)
    published(one, two, version=1)
    published(two, one, version=2)
    published(oracle, version=2)
    assert one.holds(oracle) and two.holds(oracle)
