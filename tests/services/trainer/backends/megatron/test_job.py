"""A GRPO job on two Megatron ranks, as the trainer is run: steps, publications, checkpoints, refusals, a lost rank."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.errors import InvalidJob, InvalidState, NonFinite, Unavailable
from services.trainer.checkpoints import exported
from services.trainer.ranks.commands import ControlThread
from tests.models import random_model
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.conftest import TOPOLOGIES
from tests.services.trainer.checkpoints.saved import assert_same_files
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import IMPATIENT, TwoRanks, trainer
from tests.services.trainer.publication.receiver import Receiver, reference
from tests.services.trainer.ranks.test_ranks import EARLY, EXACT, SIZES
from tests.services.trainer.step import test_distillation
from tests.services.trainer.step.test_result import assert_same_shown, step_of
from tests.services.trainer.step.test_step import OPTIMIZER, Groups, local_step, poisoned_logprob, poisoned_reward

ALGORITHM = {"kl": {"name": "k3"}, "kl_coefficient": 0.5, "entropy_coefficient": 0.01}


# test_parity.py has the updates on two data-parallel ranks
@pytest.mark.parametrize("name", ["TP2", "PP2", pytest.param("DP2", marks=pytest.mark.matrix)])
def test_trains_as_one_rank_of_the_other_backend_and_publishes_it(
    name: str,
    two_ranks: TwoRanks,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    tmp_path: Path,
) -> None:
    """Relative 2e-5 of loss and gradient norm over three steps of two updates each, with a reference. The second step
    comes in parts of one, two and one groups, the third in two halves."""
    spoken = {"token_budget": 64, "optimizer": OPTIMIZER, "updates_per_step": 2}
    here = job_spec(tied_model, algorithm=ALGORITHM, trainer=spoken)
    megatron = {**spoken, "backend": "megatron", "backend_options": TOPOLOGIES[name]}
    there = job_spec(tied_model, algorithm=ALGORITHM, trainer=megatron)
    backend, step = local_step(here, one_rank, control, served)
    job = f"job-{name}"
    assert two_ranks.calls.configure(there, job=job).parameters == backend.parameters
    for number in (1, 2, 3):
        groups = random_groups(4, 4, seed=number)
        alone, together = step(number, groups), two_ranks.step(number, groups, job, SIZES[number])
        for metric in EXACT:
            if metric in alone:
                assert together[metric] == pytest.approx(alone[metric], rel=2e-5, abs=2e-6), (number, metric)
        if number == 1:
            again = two_ranks.calls.step(number, groups, two_ranks.served.address, job)
            assert_same_shown(step_of(here, groups, one_rank, control, served).shown, again.shown, most=2e-5)
    ref = reference(3, job=job)
    receiver = Receiver(ref, two_ranks.calls.prepare(ref, 1, "float32"))
    sent = two_ranks.calls.transfer(ref)
    received = receiver.wait()
    assert list(sent.checksums.values) == receiver.checksums()
    two_ranks.calls.finish(ref)
    receiver.close()
    two_ranks.calls.save(str(tmp_path / "saved"), huggingface=True, job=job)
    saved = load_file(tmp_path / "saved" / "huggingface" / "model.safetensors")
    for info, tensor in backend.export("float32"):
        assert tensor is not None
        torch.testing.assert_close(saved[info.name], tensor, atol=2e-5, rtol=1e-4)
        assert torch.equal(received[info.name], saved[info.name])


@pytest.mark.matrix  # the test above has parts on every topology
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        *(pytest.param({"preset": name}, {}, id=f"preset {name}") for name in EARLY),
        pytest.param(ALGORITHM, {"offload_parameters": True}, id="parameters in host memory"),
        pytest.param(ALGORITHM, {"release_gradients": True}, id="gradients released"),
        pytest.param(ALGORITHM, {"distributed_optimizer": False}, id="own optimizer state"),
        pytest.param(
            {"advantage": {"name": "gae", "options": {"whiten": False}}, "critic": {"optimizer": OPTIMIZER}},
            {},
            id="critic",
        ),
    ],
)
def test_steps_in_parts_train_as_whole_ones(
    algorithm: dict[str, Any], options: dict[str, Any], two_ranks: TwoRanks, tied_model: Path, tmp_path: Path
) -> None:
    """Relative 2e-5 of loss and gradient norm over three steps, and weights within 2e-6."""
    trained = {"token_budget": 64, "optimizer": OPTIMIZER, "backend": "megatron", "backend_options": options}
    spec, metrics, weights = job_spec(tied_model, algorithm=algorithm, trainer=trained), [], []
    for name, sizes in (("whole", {1: (), 2: (), 3: ()}), ("parts", {1: (1, 3), 2: (1, 2, 1), 3: (2, 2)})):
        job = f"job-{name}-{len(list(tmp_path.iterdir()))}"
        two_ranks.calls.configure(spec, job=job, configuration=str(tmp_path))
        metrics.append([two_ranks.step(step, random_groups(4, 4, seed=step), job, sizes[step]) for step in sizes])
        two_ranks.calls.save(str(tmp_path / name), huggingface=True, job=job)
        weights.append(load_file(tmp_path / name / "huggingface" / "model.safetensors"))
    for whole, parts in zip(*metrics, strict=True):
        assert parts["batch/parts"] > 1 == whole["batch/parts"]
        for metric in (*EXACT, "critic/vf_loss", "critic/grad_norm"):
            if metric in whole:
                assert parts[metric] == pytest.approx(whole[metric], rel=2e-5, abs=2e-6), metric
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-6, rtol=1e-5)


@pytest.mark.matrix  # test_distillation.py has the losses on one rank of FSDP2
@pytest.mark.parametrize("use_rewards", [False, True], ids=["alone", "beside the reward"])
@pytest.mark.parametrize("loss", test_distillation.LOSSES)
def test_distils_as_one_rank_of_the_other_backend(
    loss: str,
    use_rewards: bool,
    two_ranks: TwoRanks,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
) -> None:
    """Relative 2e-5 of loss and gradient norm over three steps, over two ranks that each hold half of the vocabulary.
    Metrics that are differences of log-probabilities have the tolerance of those, 2e-5 (`test_parity.py`)."""
    here = test_distillation.job(tied_model, loss, lr=1e-3, token_budget=64, use_rewards=use_rewards)
    options = {"backend": "megatron", "backend_options": {"tensor_parallel": 2}}
    there = here.model_copy(update={"trainer": here.trainer.model_copy(update=options)})
    teacher, job = random_model(tied=True, seed=7), f"job-{loss}-{use_rewards}"
    _, step = local_step(here, one_rank, control, served)
    two_ranks.calls.configure(there, job=job)
    for number in (1, 2, 3):
        groups = random_groups(4, 4, seed=number)
        test_distillation.teach(groups, teacher, loss)
        alone, together = step(number, groups), two_ranks.step(number, groups, job)
        compared = [name for name in alone if name.startswith("distillation/")]
        assert "distillation/loss" in compared
        for metric in (*compared, "actor/grad_norm", "actor/entropy"):
            small = 2e-5 if metric in ("distillation/kl", "distillation/abs_logprob_diff") else 2e-6
            assert together[metric] == pytest.approx(alone[metric], rel=2e-5, abs=small), (number, metric)


# step/test_step.py has both on one rank
@pytest.mark.parametrize("poison", [pytest.param(poisoned_reward, marks=pytest.mark.matrix), poisoned_logprob])
def test_a_number_that_is_none_stops_the_step_and_nothing_is_written(
    poison: Callable[[Groups], str], two_ranks: TwoRanks, tied_model: Path, tmp_path: Path
) -> None:
    trainer = {"backend": "megatron", "updates_per_step": 2, "backend_options": {"tensor_parallel": 2}}
    job = f"job-{poison.__name__}"
    two_ranks.calls.configure(job_spec(tied_model, trainer={**trainer, "optimizer": OPTIMIZER}), job=job)
    two_ranks.step(1, random_groups(4, 4), job)
    weights = []
    for name in ("before", "after"):
        two_ranks.calls.save(str(tmp_path / name), huggingface=True, job=job)
        weights.append(load_file(tmp_path / name / "huggingface" / "model.safetensors"))
        if name == "before":
            groups = random_groups(4, 4, seed=1)
            with pytest.raises(NonFinite, match=poison(groups)):
                two_ranks.step(2, groups, job)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert two_ranks.step(2, random_groups(4, 4, seed=2), job)["actor/grad_norm"] > 0


def test_what_is_not_trained_is_in_the_exports(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """The policy's and the critic's: a vision tower."""
    tiny.save("qwen2_5_vl", tmp_path / "model")
    trained = {"backend": "megatron", "token_budget": 64, "backend_options": {"tensor_parallel": 2}}
    spec = job_spec(tmp_path / "model", algorithm={"preset": "ppo"}, trainer=trained)
    two_ranks.calls.configure(spec, job="job-vision")
    two_ranks.calls.save(str(tmp_path / "saved"), huggingface=True, job="job-vision")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    policy, critic = (load_file(tmp_path / "saved" / kind / "model.safetensors") for kind in ("huggingface", "critic"))
    assert policy.keys() == whole.keys() and any("visual" in name for name in whole)
    assert critic.keys() == whole.keys() - {"lm_head.weight"} | {"score.weight"}
    for name, tensor in whole.items():
        assert torch.equal(policy[name], tensor), name
        assert name == "lm_head.weight" or torch.equal(critic[name], tensor), name
    exported.write(tmp_path / "saved", tmp_path / "exported")
    assert_same_files(tmp_path / "exported", tmp_path / "saved" / "huggingface")


def test_a_topology_that_does_not_fit_the_ranks_is_refused_and_the_trainer_lives(
    two_ranks: TwoRanks, tied_model: Path
) -> None:
    spec = job_spec(tied_model, trainer={"backend": "megatron", "backend_options": {"pipeline_parallel": 4}})
    with pytest.raises(InvalidJob, match=r"pipeline 4 · context 1 = 4 does not divide the trainer's 2 ranks"):
        two_ranks.calls.configure(spec, job="job-refused")
    spec = job_spec(tied_model, trainer={"backend": "megatron", "backend_options": {"offload_optimizer": True}})
    with pytest.raises(InvalidJob, match=r"offload_optimizer: true: .* no device memory to spare"):
        two_ranks.calls.configure(spec, job="job-refused")
    good = job_spec(tied_model, trainer={"backend": "megatron", "backend_options": {"tensor_parallel": 2}})
    assert two_ranks.calls.configure(good, job="job-taken").world_size == 2


@pytest.mark.matrix  # ../../ranks/test_ranks.py names a lost rank, test_checkpoint.py goes on in another topology
def test_a_rank_lost_in_a_step_is_named_and_the_job_goes_on_from_its_checkpoint(
    two_ranks: TwoRanks, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    """The second stage of two dies; another topology takes over, and trains as if nothing had been."""
    trained = {"optimizer": OPTIMIZER, "backend": "megatron"}
    spec = job_spec(tied_model, trainer={**trained, "backend_options": {"pipeline_parallel": 2}})
    first, second = random_groups(4, 4, seed=1), random_groups(4, 4, seed=2)
    with trainer(served, tmp_path / "log", ranks=2, **IMPATIENT) as running:
        calls = running.calls()
        calls.configure(spec)
        served.script.groups = first
        calls.step(1, first, served.address)
        calls.save(str(tmp_path / "saved"))
        served.script.groups = second
        served.script.fetches.clear()
        served.script.hold.clear()
        stepping = running.in_background(lambda: calls.step(2, second, served.address))
        while len(served.script.fetches) < 2:
            time.sleep(0.05)
        lost = running.ranks()[1]
        lost.send_signal(signal.SIGKILL)
        served.script.hold.set()
        with pytest.raises(Unavailable, match=rf"Step failed: .*rank 1 on .*\(pid {lost.pid}\)"):
            stepping.result(120)
        assert running.process.wait(60) != 0
    two_ranks.calls.configure(spec, job="job-undisturbed")
    undisturbed = [two_ranks.step(n, groups, "job-undisturbed") for n, groups in ((1, first), (2, second))][1]
    spec = job_spec(tied_model, trainer={**trained, "backend_options": {"tensor_parallel": 2}})
    configured = two_ranks.calls.configure(spec, job="job-resumed", checkpoint=str(tmp_path / "saved"))
    assert configured.version == 1
    resumed = two_ranks.step(2, second, "job-resumed")
    for metric in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert resumed[metric] == pytest.approx(undisturbed[metric], rel=2e-5, abs=2e-6), metric


@pytest.mark.matrix  # ../../checkpoints/test_checkpoint.py: it is refused before the backend reads
def test_a_checkpoint_of_another_architecture_is_refused(
    two_ranks: TwoRanks, tied_model: Path, untied_model: Path, tmp_path: Path
) -> None:
    options = {"backend": "megatron", "backend_options": {"tensor_parallel": 2}}
    two_ranks.calls.configure(job_spec(untied_model, trainer=options), job="job-1")
    two_ranks.calls.save(str(tmp_path / "untied"))
    with pytest.raises(InvalidState, match="checkpoint of another model than the job's"):
        two_ranks.calls.configure(
            job_spec(tied_model, trainer=options), job="job-2", checkpoint=str(tmp_path / "untied")
        )
