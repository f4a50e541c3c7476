"""PPO with a critic on two Megatron ranks, of every kind of parallelism, against one rank of the other backend."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import InvalidJob
from services.trainer.ranks.commands import ControlThread
from tests.models import save_tiny_model
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.conftest import TOPOLOGIES
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import TwoRanks
from tests.services.trainer.step.test_critic import CRITIC, algorithm
from tests.services.trainer.step.test_step import OPTIMIZER, local_step

SAME = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/vf_explained_var")


# test_job.py has the other topologies without a critic
@pytest.mark.parametrize(
    "name", ["TP2", *(pytest.param(n, marks=pytest.mark.matrix) for n in TOPOLOGIES if n != "TP2")]
)
def test_trains_as_one_rank_of_the_other_backend_and_goes_on_from_its_checkpoint(
    name: str,
    two_ranks: TwoRanks,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    tmp_path: Path,
) -> None:
    """Three steps of two updates each, the first of which warms the critic up; the second is saved and repeated."""
    chosen = {**algorithm(lam=0.9), "critic": {**CRITIC, "warmup_steps": 1}}
    spoken = {"token_budget": 64, "optimizer": OPTIMIZER, "updates_per_step": 2}
    megatron = {**spoken, "backend": "megatron", "backend_options": TOPOLOGIES[name]}
    backend, step = local_step(job_spec(tied_model, algorithm=chosen, trainer=spoken), one_rank, control, served)
    job = f"job-critic-{name}"
    two_ranks.calls.configure(job_spec(tied_model, algorithm=chosen, trainer=megatron), job=job)
    for number in (1, 2, 3):
        groups = random_groups(4, 4, seed=number)
        alone, together = step(number, groups), two_ranks.step(number, groups, job)
        assert ("actor/pg_loss" in together) is (number > 1)
        for metric in SAME:
            if metric in alone:
                assert together[metric] == pytest.approx(alone[metric], rel=5e-5, abs=2e-6), (number, metric)
        if number == 2:
            two_ranks.calls.save(str(tmp_path / "two"), job=job)
    two_ranks.calls.save(str(tmp_path / "three"), huggingface=True, job=job)
    saved = load_file(tmp_path / "three" / "critic" / "model.safetensors")
    assert backend.critic is not None
    expected = {info.name: tensor for info, tensor in backend.critic.export("float32")}
    assert saved.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(saved[key], tensor, atol=2e-5, rtol=1e-4)
    two_ranks.calls.call(TrainerRpc.Load, pb.LoadRequest(job_id=job, path=str(tmp_path / "two")))
    repeated = two_ranks.step(3, groups, job)
    for metric in SAME:
        assert repeated[metric] == pytest.approx(together[metric], rel=1e-6), metric


@pytest.mark.matrix  # tests/services/trainer/step/test_critic.py has such a critic on FSDP2
def test_experts_and_a_critic_of_another_folder(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """The values of a critic that was saved are those of the one that begins with it."""
    tiny.save("qwen3_moe", tmp_path / "model")
    options = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}
    spoken = {"token_budget": 64, "backend": "megatron", "backend_options": options}
    groups = random_groups(4, 4)
    chosen = {"preset": "ppo", "kl": None, "critic": {"warmup_steps": 5, "optimizer": {"lr": 1e-2}}}
    two_ranks.calls.configure(job_spec(tmp_path / "model", algorithm=chosen, trainer=spoken), job="job-first")
    first = two_ranks.step(1, groups, "job-first")
    assert first["critic/values/mean"] == 0.0 and first["critic/grad_norm"] > 0
    two_ranks.calls.save(str(tmp_path / "saved"), huggingface=True, job="job-first")
    second = two_ranks.step(2, groups, "job-first")
    chosen["critic"] = {"path": str(tmp_path / "saved" / "critic"), "warmup_steps": 5}
    two_ranks.calls.configure(job_spec(tmp_path / "model", algorithm=chosen, trainer=spoken), job="job-second")
    again = two_ranks.step(1, groups, "job-second")
    assert again["critic/values/mean"] == pytest.approx(second["critic/values/mean"], rel=1e-5) != 0.0
    assert again["critic/vf_loss"] == pytest.approx(second["critic/vf_loss"], rel=1e-5)


@pytest.mark.matrix  # tests/services/trainer/service/test_refusals.py has refusals after which it lives
def test_a_folder_that_is_no_critic_is_refused_and_the_trainer_lives(
    two_ranks: TwoRanks, tied_model: Path, tmp_path: Path
) -> None:
    spoken = {"backend": "megatron", "backend_options": {"tensor_parallel": 2}}
    other = tmp_path / "other"
    tiny.save("mixtral", other)
    config = (other / "config.json").read_text().replace('"vocab_size": 259', '"vocab_size": 300')
    (other / "config.json").write_text(config)
    for path, words in (
        (tmp_path / "nothing", r"algorithm\.critic\.path: .* cannot be read"),
        (other, "it knows 300 tokens and the policy 259"),
    ):
        chosen = {"preset": "ppo", "critic": {"path": str(path)}}
        with pytest.raises(InvalidJob, match=words):
            two_ranks.calls.configure(job_spec(tied_model, algorithm=chosen, trainer=spoken), job="job-critic-refused")
    good = job_spec(save_tiny_model(tmp_path / "good", tied=False), algorithm={"preset": "ppo"}, trainer=spoken)
    assert two_ranks.calls.configure(good, job="job-critic-taken").world_size == 2
