"""Versions sent as changes over Gloo, each rank a thread: receivers hold, bit for bit, what the senders hold."""

import pytest
import torch

from millrace.weights.plans.sharded import plan
from millrace.weights.transfer.delta.codec import Coding
from millrace.weights.transfer.delta.exchange import ReceivingDeltas, SendingDeltas, Snapshot
from millrace.weights.transfer.pipeline import ReceivePipeline, SendPipeline
from tests.weights.transfer.ranks import MANIFEST, Ranks, check, fused, split, values


def stepped(version):
    """All tensors at a version: most elements are as they were at the first."""
    tensors, random = values(), torch.Generator().manual_seed(version)
    for tensor in tensors if version > 1 else []:
        flat = tensor.view(-1)
        flat[torch.rand(len(flat), generator=random) < 0.03] *= 1.01
    return tensors


class Publications:
    """Senders with their snapshots, and receivers, for one plan."""

    def __init__(self, senders=1, dim=0, replicas=1, workers=1, *, staged):
        self.senders, self.dim, self.workers, self.staged = senders, dim, workers, staged
        self.held = [split(values(), rank, senders, dim) for rank in range(senders)]
        self.wanted = [fused(rank, workers) for _ in range(replicas) for rank in range(workers)]
        boxes = [[m.layout.boxes for m in side] for side in (self.held, self.wanted)]
        self.plan = plan(MANIFEST, *boxes, message_bytes=512)
        self.sending = [SendPipeline(self.plan, rank, memory) for rank, memory in enumerate(self.held)]
        self.receiving = [
            ReceivePipeline(self.plan, senders + i, memory, staged=staged) for i, memory in enumerate(self.wanted)
        ]
        self.snapshots = [Snapshot(self.plan.hash, s.packed, s.device) for s in self.sending]

    def run(self, version, *, whole):
        """Sends a version. Returns the ranks, the senders' exchanges, checksums of both sides by rank."""
        for rank, memory in enumerate(self.held):
            for buffer, fresh in zip(
                memory.buffers, split(stepped(version), rank, self.senders, self.dim).buffers, strict=True
            ):
                buffer.copy_(fresh)
        exchanges, sent, got = [], {}, {}

        def send(channel, pipeline, snapshot):
            exchanges.append(SendingDeltas(channel, snapshot, pipeline.stream, whole=whole))
            sent.update(pipeline.run(exchanges[-1])[0])

        def receive(channel, i, pipeline):
            got[i] = pipeline.run(ReceivingDeltas(channel, pipeline.stream), onto_base=not whole).sums

        ranks = Ranks(self.plan.world_size, f"job/{version}/1/0")
        ranks.run(
            *(lambda c, s=s, n=n: send(c, s, n) for s, n in zip(self.sending, self.snapshots, strict=True)),
            *(lambda c, i=i, r=r: receive(c, i, r) for i, r in enumerate(self.receiving)),
        )
        return ranks, exchanges, sent, got

    def check(self, version, sent, got):
        for i, (memory, receiver) in enumerate(zip(self.wanted, self.receiving, strict=True)):
            assert got[i] == {content: sent[content] for content in got[i]}
            assert set(got[i]) == set(self.plan.contents_of(self.senders + i).tolist())
            if self.staged:
                receiver.apply()
            check(memory, i % self.workers, self.workers, stepped(version))


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize(
    ("senders", "dim", "replicas", "workers"), [(1, 0, 1, 1), (2, 0, 1, 2), (2, 1, 2, 2), (1, 0, 3, 1)]
)
def test_receivers_hold_what_senders_hold_after_changes_alone(senders, dim, replicas, workers, staged):
    publications = Publications(senders, dim, replicas, workers, staged=staged)
    for version, whole in ((1, True), (2, False), (3, False), (4, True), (5, False), (5, False)):
        ranks, exchanges, sent, got = publications.run(version, whole=whole)
        assert ranks.failures == [None] * publications.plan.world_size
        publications.check(version, sent, got)
        words = sum(e.packed_words for e in exchanges)
        assert (sum(e.sent_bytes for e in exchanges) < 2 * words) == (not whole)
    assert sum(e.changed_words for e in exchanges) == 0  # the last version was there already


@pytest.mark.parametrize("staged", [True, False])
def test_a_receiver_with_another_base_shows_by_its_checksums(staged):
    publications = Publications(staged=staged)
    _, _, sent, got = publications.run(1, whole=True)
    publications.check(1, sent, got)
    publications.wanted[0].buffers[0][3, 5] += 1.0
    ranks, _, sent, got = publications.run(2, whole=False)
    assert ranks.failures == [None, None]
    assert [n for n in got[0] if got[0][n] != sent[n]], "the checksums of the whole result are compared"
    ranks, _, sent, got = publications.run(3, whole=True)
    publications.check(3, sent, got)


def test_a_message_in_which_most_has_changed_travels_whole(monkeypatch):
    publications = Publications(staged=True)
    publications.check(1, *publications.run(1, whole=True)[2:])
    codings, encode = [], Snapshot.encode

    def noted(self, content, message, *, whole):
        header, encoded = encode(self, content, message, whole=whole)
        codings.append(header.coding)
        return header, encoded

    monkeypatch.setattr(Snapshot, "encode", noted)
    monkeypatch.setattr("tests.weights.transfer.delta.test_exchange.stepped", lambda version: values(version))
    _, _, sent, got = publications.run(2, whole=False)
    publications.check(2, sent, got)
    assert Coding.WHOLE in codings
