"""A loader that writes constants too, and one that leaves something out, by both paths."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidJob
from millrace.ids import Version
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.transfer.session import PublicationSession
from services.rollout.weights.in_worker.gather_broadcast import ComparingLoader
from services.rollout.weights.in_worker.model import WorkerLayout
from services.rollout.weights.in_worker.sharded import IncomingShards
from services.rollout.weights.transfer_request import TransferRequest
from tests.services.rollout.weights.in_worker.models import LoaderModel

MANIFEST = Manifest((TensorInfo("a", (3, 4), "float32"), TensorInfo("b", (1, 4), "float32")))
REQUEST = TransferRequest("job/1/1/1", Version(1), MANIFEST, "127.0.0.1", 1, 2, 1, 5.0, weights_pb2.PATH_SHARDED)


def test_padding_is_filled_with_every_version() -> None:
    parameter = torch.full((6, 4), 5.0)

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            parameter[:3].copy_(tensor) if name == "a" else parameter[3:4].copy_(tensor)
            parameter[4:].fill_(0)

    model = LoaderModel(load, {"p": parameter})
    layout = WorkerLayout(model)
    layout.boxes(MANIFEST)
    assert (parameter == 5).all()
    pipeline: Any = SimpleNamespace(run=None, device=torch.device("cpu"), slot_bytes=0)
    incoming = IncomingShards(REQUEST, 1, pipeline, PublicationSession(), layout, model, shadow=False)
    assert incoming.place().loader_tensors == 0
    assert (parameter[:4] == 5).all() and not parameter[4:].any()


def test_a_row_that_is_written_twice_hides_none_that_is_not() -> None:
    parameter = torch.zeros(4, 4)

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            parameter[0:3].copy_(tensor) if name == "a" else parameter[1:2].copy_(tensor)

    tensors = {t.name: torch.ones(t.shape) for t in MANIFEST.tensors}
    with pytest.raises(InvalidJob, match="only a part of, p"):
        ComparingLoader(LoaderModel(load, {"p": parameter})).place(REQUEST, tensors)
