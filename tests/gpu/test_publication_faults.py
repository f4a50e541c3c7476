"""Faults in each phase of a sharded publication, over NCCL: a trainer of two ranks and two replicas, a GPU each. With
each engine one job goes on through all of its faults, strictly on-policy, in bfloat16.

What differs from engine to engine is the receiver, which is inside the workers of vLLM and SGLang. A replica of theirs
takes a minute to start, so they are killed once.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.local.host import visible_devices
from services.rollout.engines import probe
from tests.e2e.conftest import vowels_job
from tests.e2e.faults import FAULTS, RANKS, REPLICAS, Whole
from tests.models import FOR_KERNELS, save_tiny_model
from tests.services.coordinator.conftest import running

GPUS = RANKS + REPLICAS
pytestmark = [
    pytest.mark.gpu(GPUS),
    pytest.mark.chaos,
    pytest.mark.timeout(600),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"max_num_seqs": 8},
    "vllm": {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True, "gpu_memory_utilization": 0.1},
    "sglang": {
        "attention_backend": "triton",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 8,
        "max_running_requests": 8,
        "mem_fraction_static": 0.3,
    },
}
LATEST_S = {"transformers": 120.0, "vllm": 240.0, "sglang": 300.0}
"""By when whatever is waited for has come, a replica's start too."""
OF_RECEIVERS = [fault for fault in FAULTS if fault.startswith(("receiver SIGSTOP", "plan", "corrupted", "coordinator"))]
"""Those that leave the receiver alive."""


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    engine = request.param
    if not (found := probe(engine)).ok:
        pytest.skip(found.why)
    folder, failed = tmp_path_factory.mktemp(f"faults-{engine}"), request.session.testsfailed
    with pytest.MonkeyPatch.context() as patch, running(folder / "coordinator") as coordinator:
        # SGLang turns it off in its processes alone; ranks have to agree.
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        # The first communicator that a process is in takes seconds.
        options = {"deadline_s": 10.0, "latest_s": LATEST_S[engine]}
        everything = Whole(folder, coordinator, engine=engine, devices=visible_devices()[:GPUS], **options)
        try:
            job = vowels_job(folder, save_tiny_model(folder / "model", tied=True, sizes=FOR_KERNELS))
            job["rollout"] |= {"dtype": "bfloat16", "engine_options": OPTIONS[engine]}
            job["trainer"] |= {"dtype": "bfloat16"}
            everything.begin(job)
            yield everything
        finally:
            everything.close()
            if request.session.testsfailed > failed:
                print(everything.logs())


@pytest.fixture(autouse=True)
def sound(whole: Whole) -> Iterator[None]:
    """Two replicas and a trainer for the next test, whatever this one came to."""
    yield
    whole.fix()
    whole.check_sound("rollout_corr/k3_kl", 0.01)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("whole", ["transformers"], indirect=True, scope="module")
def test_the_job_goes_on_without_whoever_failed(fault: str, whole: Whole) -> None:
    whole.undergo(fault)


@pytest.mark.parametrize("fault", [*OF_RECEIVERS, "receiver SIGKILL in transfer"])
@pytest.mark.parametrize("whole", ["vllm", "sglang"], indirect=True, scope="module")
def test_it_goes_on_where_workers_receive(fault: str, whole: Whole) -> None:
    whole.undergo(fault)
