"""What a worker keeps to receive into is kept once: what was taken for an earlier plan is free for the next."""

import gc
import weakref
from typing import Any

import pytest
import torch

from millrace.ids import Version
from millrace.weights.plans import wire_layouts as sides
from millrace.weights.plans.layout import whole_layout
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.wire.v1 import weights_pb2
from services.rollout.weights import sharded as shards
from services.rollout.weights.transfer_request import TransferRequest

MANIFEST = Manifest((TensorInfo("a", (64, 64), "float32"), TensorInfo("b", (64,), "float32")))


class Worker:
    """One worker of one of several equal replicas, and the staging that it holds at any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_in_all: int) -> None:
        self.parameters = {t.name: torch.zeros(t.shape) for t in MANIFEST.tensors}
        self.shards = shards.Shards(self._load, self.parameters, frozenset())
        self.made: list[weakref.ref[shards.ReceivePipeline]] = []
        self.held_at_most = 0
        make = shards.ReceivePipeline

        def made(*arguments: Any, **options: Any) -> shards.ReceivePipeline:
            before, made = self.held, make(*arguments, **options)
            self.held_at_most = max(self.held_at_most, before + made.slot_bytes)
            self.made.append(weakref.ref(made))
            return made

        monkeypatch.setattr(shards, "ReceivePipeline", made)
        monkeypatch.setattr(shards, "_free_bytes", lambda device: bytes_in_all - self.held)

    @property
    def held(self) -> int:
        gc.collect()
        return sum(receiving.slot_bytes for made in self.made if (receiving := made()) is not None)

    def _load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.parameters[name].copy_(tensor)

    def request(self, replicas: int, version: int) -> TransferRequest:
        both = weights_pb2.Sides(
            senders=sides.encode([whole_layout(MANIFEST).boxes]),
            receivers=sides.encode([self.shards.boxes(MANIFEST)] * replicas),
        )
        return TransferRequest(
            key=f"job/{version}/1/1",
            version=Version(version),
            manifest=MANIFEST,
            host="127.0.0.1",
            port=1,
            world_size=1 + replicas,
            first_rank=1,
            timeout_s=5.0,
            sides=both,
            communicator=f"channel {version}",
        )

    def receive(self, replicas: int, version: int) -> bool:
        """Prepares a transfer, and calls it off; whether it was staged."""
        transfer_request = self.request(replicas, version)
        staged = self.shards.fits(transfer_request, 1)
        self.shards.prepare(transfer_request, 1, staged=staged).close()
        return staged


def test_a_changed_membership_is_staged_where_the_one_before_was(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, bytes_in_all=int(1.5 * MANIFEST.bytes))
    assert [worker.receive(replicas, version) for version, replicas in enumerate([1, 2, 2, 3], 1)] == [True] * 4
    assert worker.held_at_most < 1.5 * MANIFEST.bytes
    worker.shards.leave()
    assert worker.held == 0


def test_what_is_made_ready_in_another_way_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, bytes_in_all=10 * MANIFEST.bytes)
    for staged in (True, False, True):
        worker.shards.prepare(worker.request(1, 1), 1, staged=staged).close()
    assert worker.held_at_most < 1.5 * MANIFEST.bytes


def test_a_delivery_under_way_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, bytes_in_all=10 * MANIFEST.bytes)
    coming = worker.shards.prepare(worker.request(1, 1), 1, staged=True)
    assert worker.shards.fits(worker.request(2, 2), 1)
    assert worker.held == coming.receiving.slot_bytes


def test_what_torch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert shards._free_bytes(torch.device("cuda")) == 140
