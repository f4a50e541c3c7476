"""Faults in the phases of a sharded publication, over Gloo, with everything real: a trainer of two ranks, replicas as
processes, a coordinator. One job goes on through all of them, strictly on-policy, in float32.

`make test` has a receiver that is killed. A sender's rank is lost in
tests/services/trainer/publication/test_shards_over_ranks.py, and a corrupted byte reaches a real replica in
tests/services/rollout/weights/test_receive_shards.py. The rest is `matrix`: that the coordinator recovers from
every fault in every phase is shown with simulated members by
tests/services/coordinator/publication/test_publisher.py (replicas), test_joining.py (siblings) and
tests/services/coordinator/test_recovery.py (trainer and coordinator). The same faults with an adapter instead of whole
weights, and with changes alone, are `matrix`, too: tests/services/rollout/weights/test_adapters.py and
test_receive_deltas.py, and tests/services/coordinator/publication/test_adapters.py cover them.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import vowels_job
from tests.e2e.faults import FAULTS, Whole
from tests.models import save_tiny_model
from tests.services.coordinator.conftest import running

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(300)]


COVERING = "receiver SIGKILL in transfer"
assert COVERING in FAULTS


@pytest.fixture(
    scope="module",
    params=["weights", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("adapter", "changes"))],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("faults")
    with running(folder / "coordinator") as coordinator:
        # However busy the machine; how long it took is printed at the end.
        everything = Whole(folder, coordinator, deadline_s=5.0, latest_s=120.0)
        try:
            job = vowels_job(folder, save_tiny_model(folder / "model", tied=True))
            job["rollout"]["engine_options"] = {"max_num_seqs": 8}
            if request.param == "adapter":
                job["model"]["lora"] = {"rank": 4}
                job["trainer"]["optimizer"]["lr"] = 1e-3
            if request.param == "changes":
                job["publication"] = {"path": "delta"}
            everything.begin(job)
            yield everything
        finally:
            everything.close()


@pytest.fixture(autouse=True)
def sound(whole: Whole) -> Iterator[None]:
    """Two replicas and a trainer for the next test, whatever this one came to."""
    yield
    whole.fix()
    whole.check_sound("training/rollout_logprobs_diff_max", 1e-2)


@pytest.mark.parametrize(
    "fault", [fault if fault == COVERING else pytest.param(fault, marks=pytest.mark.matrix) for fault in FAULTS]
)
def test_the_job_goes_on_without_whoever_failed(fault: str, whole: Whole) -> None:
    whole.undergo(fault)
