"""How all workers of an engine receive a version: as it asks, or as their memory allows."""

import pytest

from millrace.contracts.v1 import weights_pb2
from millrace.ids import Version
from millrace.weights.plans.manifest import Manifest
from services.rollout.engines.versioned import in_shadow
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Prepared

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
