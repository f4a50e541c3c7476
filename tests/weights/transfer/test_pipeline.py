"""Plans carried out over Gloo, each rank a thread: receivers hold, bit for bit, what the senders hold."""

import threading
import time

import pytest
import torch

from millrace.errors import PublicationFailed
from millrace.weights.plans.sharded import plan
from millrace.weights.transfer.pipeline import ReceivePipeline, SendPipeline, SlotRing
from millrace.weights.transfer.session import FailureSignal
from millrace.weights.transfer.store import connect_store, serve_store
from tests.weights.transfer.ranks import MANIFEST, Ranks, check, fused, split, values


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize(
    ("senders", "dim", "replicas", "workers"), [(1, 0, 1, 1), (2, 0, 1, 2), (2, 1, 2, 2), (1, 0, 3, 1)]
)
def test_receivers_hold_what_senders_hold(senders, dim, replicas, workers, staged):
    held = [split(values(), rank, senders, dim) for rank in range(senders)]
    wanted = [fused(rank, workers) for _ in range(replicas) for rank in range(workers)]
    made = plan(MANIFEST, [m.layout.boxes for m in held], [m.layout.boxes for m in wanted], message_bytes=512)
    assert made.rounds > 3
    sending = [SendPipeline(made, rank, memory) for rank, memory in enumerate(held)]
    receiving = [ReceivePipeline(made, senders + i, memory, staged=staged) for i, memory in enumerate(wanted)]
    for version in (1, 2):  # the second through the same slots
        for memory, now in zip(
            held, (split(values(version), rank, senders, dim) for rank in range(senders)), strict=True
        ):
            for buffer, fresh in zip(memory.buffers, now.buffers, strict=True):
                buffer.copy_(fresh)
        sent, got = {}, {}
        ranks = Ranks(made.world_size, f"job/{version}/1/0")
        ranks.run(
            *(lambda c, s=s, sent=sent: sent.update(s.run(c)[0]) for s in sending),
            *(lambda c, i=i, r=r, got=got: got.update({i: r.run(c)}) for i, r in enumerate(receiving)),
        )
        assert ranks.failures == [None] * made.world_size
        for i, (memory, receiver) in enumerate(zip(wanted, receiving, strict=True)):
            assert got[i].sums == {content: sent[content] for content in got[i].sums}
            assert set(got[i].sums) == set(made.contents_of(senders + i).tolist())
            if staged:
                receiver.apply()
            check(memory, i % workers, workers, values(version))


def test_a_staged_version_that_does_not_stay_in_place_is_told_with_its_tensors(monkeypatch):
    held, wanted = split(values(), 0, 1), fused(0, 1)
    made = plan(MANIFEST, [held.layout.boxes], [wanted.layout.boxes], message_bytes=512)
    sending, receiving = SendPipeline(made, 0, held), ReceivePipeline(made, 1, wanted, staged=True)
    ranks = Ranks(2)
    ranks.run(sending.run, receiving.run)
    assert ranks.failures == [None] * 2
    monkeypatch.setattr(receiving._all_rounds, "unpack", lambda: None)
    with pytest.raises(PublicationFailed, match=rf"{MANIFEST.tensors[0].name}.* differ in the engine.*rounds in all"):
        receiving.apply()
    monkeypatch.undo()
    receiving.apply()
    check(wanted, 0, 1, values())


def test_slots_of_an_inplace_receiver_are_few_and_small():
    held, wanted = split(values(), 0, 1), fused(0, 1)
    made = plan(MANIFEST, [held.layout.boxes], [wanted.layout.boxes], message_bytes=512)
    assert ReceivePipeline(made, 1, wanted, staged=False).slot_bytes <= 3 * 2 * 512
    assert ReceivePipeline(made, 1, wanted, staged=True).slot_bytes >= MANIFEST.bytes - wanted.buffers[2].numel() * 2
    assert SendPipeline(made, 0, held).slot_bytes <= 3 * 2 * 512


def test_a_slot_that_was_reused_is_not_read():
    ring = SlotRing(2, 16, torch.device("cpu"))
    for step in range(3):
        ring.claim(step)
    ring.check(1)
    ring.check(2)
    with pytest.raises(PublicationFailed, match="holds step 2 where 0"):
        ring.check(0)
    with pytest.raises(PublicationFailed, match="claimed"):
        ring.claim(5)


def test_an_abort_frees_whoever_waits():
    held, wanted = split(values(), 0, 1), fused(0, 1)
    made = plan(MANIFEST, [held.layout.boxes], [wanted.layout.boxes], message_bytes=512)
    ranks, took = Ranks(2), []

    def waits(channel):
        threading.Timer(0.3, channel.abort, ["somebody died"]).start()
        began = time.monotonic()
        try:
            ReceivePipeline(made, 1, wanted, staged=True).run(channel)
        finally:
            took.append(time.monotonic() - began)

    ranks.run(lambda channel: time.sleep(1.0), waits)
    assert "somebody died" in str(ranks.failures[1]) and took[0] < 1.0


def test_every_rank_gets_the_failure_signal():
    store, port = serve_store("127.0.0.1", 3, 20.0)
    heard = {}
    stores = [connect_store("127.0.0.1", port, 10.0) for _ in range(3)]
    signals = [
        FailureSignal(s, "job/1/1/0", lambda reason, i=i: heard.update({i: reason})) for i, s in enumerate(stores)
    ]
    signals[1].send("rank 1 broke off")
    until = time.monotonic() + 10
    while len(heard) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert heard == {0: "rank 1 broke off", 2: "rank 1 broke off"}
    for ear in signals:
        ear.stop()
    del store
