"""A GRPO job on two Megatron ranks, as the trainer is run: steps, publications, checkpoints, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.errors import InvalidJob
from millrace.wire.v1 import trainer_pb2 as pb
from services.trainer.control import ControlThread
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import trainer
from tests.services.trainer.receiver import Receiver, reference
from tests.services.trainer.test_ranks import EXACT, TwoRanks
from tests.services.trainer.test_step import OPTIMIZER, local_step

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2": {},
}
ALGORITHM = {"kl": {"name": "k3"}, "kl_coefficient": 0.5, "entropy_coefficient": 0.01}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    log = tmp_path_factory.mktemp("two") / "log"
    with coordinator() as served, trainer(served, log, ranks=2) as running:
        yield TwoRanks(running, served)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_trains_as_one_rank_of_the_other_backend_and_publishes_it(
    name: str,
    two_ranks: TwoRanks,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    tmp_path: Path,
) -> None:
    """Relative 2e-5 of loss and gradient norm over three steps of two updates each, with a reference."""
    spoken = {"token_budget": 64, "optimizer": OPTIMIZER, "updates_per_step": 2}
    here = job_spec(tied_model, algorithm=ALGORITHM, trainer=spoken)
    megatron = {**spoken, "backend": "megatron", "backend_options": TOPOLOGIES[name]}
    there = job_spec(tied_model, algorithm=ALGORITHM, trainer=megatron)
    backend, step = local_step(here, one_rank, control, served)
    job = f"job-{name}"
    assert two_ranks.calls.configure(there, job=job).parameters == backend.parameters
    for number in (1, 2, 3):
        groups = random_groups(4, 4, seed=number)
        alone, together = step(number, groups), two_ranks.step(number, groups, job)
        for metric in EXACT:
            if metric in alone:
                assert together[metric] == pytest.approx(alone[metric], rel=2e-5, abs=2e-6), (number, metric)
    ref = reference(3, job=job)
    receiver = Receiver(ref, two_ranks.calls.prepare(ref, 1, "float32"))
    sent = two_ranks.calls.transfer(ref)
    received = receiver.wait()
    assert list(sent.checksums.values) == receiver.checksums()
    two_ranks.calls.finish(ref)
    receiver.close()
    two_ranks.calls.call("Save", pb.SaveRequest(job_id=job, path=str(tmp_path / "saved"), huggingface=True))
    saved = load_file(tmp_path / "saved" / "huggingface" / "model.safetensors")
    for info, tensor in backend.export("float32"):
        assert tensor is not None
        torch.testing.assert_close(saved[info.name], tensor, atol=2e-5, rtol=1e-4)
        assert torch.equal(received[info.name], saved[info.name])


def test_a_topology_that_does_not_fit_the_ranks_is_refused_and_the_trainer_lives(
    two_ranks: TwoRanks, tied_model: Path
) -> None:
    spec = job_spec(tied_model, trainer={"backend": "megatron", "backend_options": {"pipeline_parallel": 4}})
    with pytest.raises(InvalidJob, match=r"pipeline 4 · context 1 = 4 does not divide the trainer's 2 ranks"):
        two_ranks.calls.configure(spec, job="job-refused")
    spec = job_spec(tied_model, trainer={"backend": "megatron", "backend_options": {"context_parallel": 2}})
    with pytest.raises(InvalidJob, match=r"context_parallel: 2 will not do: .* needs a GPU"):
        two_ranks.calls.configure(spec, job="job-refused")
    good = job_spec(tied_model, trainer={"backend": "megatron", "backend_options": {"tensor_parallel": 2}})
    assert two_ranks.calls.configure(good, job="job-taken").world_size == 2
