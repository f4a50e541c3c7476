"""A worker keeps memory for one transfer: the memory of an earlier plan is free for the next."""

import gc
import weakref
from typing import Any

import pytest
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.ids import Version
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Manifest, TensorInfo
from services.rollout.weights.in_worker import sharded
from services.rollout.weights.in_worker.model import WorkerLayout
from services.rollout.weights.transfer_request import TransferRequest
from tests.layouts import whole_layout
from tests.services.rollout.weights.in_worker.models import LoaderModel

MANIFEST = Manifest((TensorInfo("a", (64, 64), "float32"), TensorInfo("b", (64,), "float32")))


class Worker:
    """One worker of one of several equal replicas, and the memory that it holds for transfers at any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_in_all: int) -> None:
        self.parameters = {t.name: torch.zeros(t.shape) for t in MANIFEST.tensors}
        model = LoaderModel(self._load, self.parameters)
        self.layout = WorkerLayout(model)
        self.path = sharded.ShardedPath(model, self.layout)
        self.made: list[weakref.ref[sharded.ReceivePipeline]] = []
        self.held_at_most = 0
        make = sharded.ReceivePipeline

        def made(*arguments: Any, **options: Any) -> sharded.ReceivePipeline:
            before, made = self.held, make(*arguments, **options)
            self.held_at_most = max(self.held_at_most, before + made.slot_bytes)
            self.made.append(weakref.ref(made))
            return made

        monkeypatch.setattr(sharded, "ReceivePipeline", made)
        monkeypatch.setattr(sharded, "free_bytes", lambda device: bytes_in_all - self.held)

    @property
    def held(self) -> int:
        gc.collect()
        return sum(pipeline.slot_bytes for made in self.made if (pipeline := made()) is not None)

    def _load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.parameters[name].copy_(tensor)

    def request(self, replicas: int, version: int) -> TransferRequest:
        both = weights_pb2.Sides(
            senders=wire_layouts.encode([whole_layout(MANIFEST).boxes]),
            receivers=wire_layouts.encode([self.layout.boxes(MANIFEST)] * replicas),
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
            path=weights_pb2.PATH_SHARDED,
            layouts=both,
            communicator=f"channel {version}",
        )

    def receive(self, replicas: int, version: int) -> bool:
        """Prepares a transfer, and aborts it; whether it was received in spare memory."""
        request = self.request(replicas, version)
        shadow = self.path.prepare(request, 1).shadow_fits
        self.path.transfer(request, 1, shadow=shadow).close()
        return shadow


def test_a_changed_membership_takes_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, bytes_in_all=int(1.5 * MANIFEST.bytes))
    assert [worker.receive(replicas, version) for version, replicas in enumerate([1, 2, 2, 3], 1)] == [True] * 4
    assert worker.held_at_most < 1.5 * MANIFEST.bytes
    worker.path.leave()
    assert worker.held == 0


def test_another_mode_takes_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, bytes_in_all=10 * MANIFEST.bytes)
    for shadow in (True, False, True):
        worker.path.transfer(worker.request(1, 1), 1, shadow=shadow).close()
    assert worker.held_at_most < 1.5 * MANIFEST.bytes


def test_a_transfer_under_way_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, bytes_in_all=10 * MANIFEST.bytes)
    incoming = worker.path.transfer(worker.request(1, 1), 1, shadow=True)
    assert worker.path.prepare(worker.request(2, 2), 1).shadow_fits
    assert worker.held == incoming.pipeline.slot_bytes


def test_what_torch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert sharded.free_bytes(torch.device("cuda")) == 140
