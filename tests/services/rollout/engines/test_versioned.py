"""How all workers of an engine receive a version: as it asks, or as their memory allows. What none has a place for."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidJob
from millrace.ids import Version
from millrace.weights.plans.manifest import Manifest, TensorInfo
from services.rollout.engines.versioned import VersionedEngine, in_shadow
from services.rollout.weights.in_worker.receiver import WeightReceiver
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Prepared
from tests.services.rollout.weights.in_worker.models import LoaderModel

ANY, SHADOW, INPLACE = (
    weights_pb2.COMMIT_MODE_UNSPECIFIED,
    weights_pb2.COMMIT_MODE_SHADOW,
    weights_pb2.COMMIT_MODE_INPLACE,
)
ROOM, NO_ROOM, ONLY_SHADOW = Prepared(True, True), Prepared(False, True), Prepared(True, False)


@pytest.mark.parametrize(
    ("mode", "workers", "shadow"),
    [
        (ANY, [ROOM, ROOM], True),
        (ANY, [ROOM, NO_ROOM], False),
        (SHADOW, [ROOM, NO_ROOM], True),
        (INPLACE, [ROOM, ROOM], False),
        (INPLACE, [ONLY_SHADOW], True),
        (ANY, [ONLY_SHADOW], True),
    ],
)
def test_all_workers_receive_in_the_same_way(mode: int, workers: list[Prepared], shadow: bool) -> None:
    path = weights_pb2.PATH_SHARDED
    request = TransferRequest("job/1/1/1", Version(1), Manifest(()), "127.0.0.1", 1, 2, 1, 5.0, path, mode=mode)  # type: ignore[arg-type]
    assert in_shadow(request, workers) is shadow


class Stages:
    """The workers of an engine whose stage n has the parameter `n` and ignores every other tensor."""

    def __init__(self, count: int) -> None:
        self._receivers = [self._receiver(str(stage)) for stage in range(count)]

    def _receiver(self, name: str) -> WeightReceiver:
        own = torch.zeros(3)

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            for each, tensor in tensors:
                if each == name:
                    own.copy_(tensor)

        return WeightReceiver(LoaderModel(load, {name: own}))

    async def ask(self, method: Callable[..., Any], *arguments: Any, paused: bool = False) -> list[Any]:
        return [getattr(receiver, method.__name__)(*arguments) for receiver in self._receivers]


def test_a_tensor_that_no_worker_takes_refuses_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionedEngine, "__abstractmethods__", frozenset())
    engine = VersionedEngine()  # type: ignore[abstract]
    engine._workers = Stages(2)  # type: ignore[assignment]
    names = ["0", "1", "0.bias", "1.bias"]
    whole, more = (Manifest(tuple(TensorInfo(n, (3,), "float32") for n in names[:count])) for count in (2, 4))
    assert len(asyncio.run(engine.describe(whole))) == 2
    with pytest.raises(
        InvalidJob, match=r"model has no place for 0\.bias, 1\.bias, which the trainer trains\. Fix: use"
    ):
        asyncio.run(engine.describe(more))
