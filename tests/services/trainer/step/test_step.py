"""A step of GRPO against plain PyTorch on a padded batch, and what stops it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.contracts.v1 import common_pb2
from millrace.contracts.v1.trainer_pb2 import StepRequest
from millrace.data.pictures import Pictures
from millrace.errors import InvalidState, NonFinite, PartialStep
from millrace.memory.shape import decoder_shape
from millrace.spec import JobSpec
from millrace.wire.arrays import pack_logprobs, pack_tokens
from services.trainer.backends import build
from services.trainer.memory.meter import MemoryMeter
from services.trainer.ranks.commands import ControlThread
from services.trainer.step import step as step_module
from services.trainer.step.schedule import KlCoefficient, learning_rate
from services.trainer.step.step import GIVEN_UP, UNCHANGED
from tests.image_models import END, PAD, START, picture, save_image_model
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups, refs
from tests.services.trainer.step.plain_grpo import Plain
from tests.services.trainer.steps import train_step

Groups = dict[str, common_pb2.Group]
OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "clip_grad_norm": 0.5, "eps": 1e-4}
"""The eps is large: with Adam's usual one a gradient that is a rounding error would move a weight as far as any
other."""

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates": {"trainer": {"updates_per_step": 2}},
    "sequence mean, one large micro-batch": {
        "algorithm": {"aggregation": "seq-mean-token-mean"},
        "trainer": {"token_budget": 4096},
    },
    "kl and entropy in the loss": {
        "algorithm": {"kl": {"name": "k3"}, "kl_coefficient": 0.5, "entropy_coefficient": 0.01},
        "trainer": {"updates_per_step": 2},
    },
    "kl in the reward, overlong penalty, temperature": {
        "algorithm": {"kl": {"name": "k1"}, "kl_in": "reward", "kl_coefficient": 0.1, "overlong_buffer_tokens": 12},
        "rollout": {"temperature": 0.7},
    },
    "correction": {"algorithm": {"correction": {"name": "tis_token", "options": {"cap": 2.0}}}},
    "ratio to the engine's log-probabilities": {"algorithm": {"old_logprobs": "rollout"}},
}

OF_EPISODES = ("plain", "kl and entropy in the loss", "kl in the reward, overlong penalty, temperature", "correction")
"""The jobs that are also compared on episodes of several turns and trajectories."""


def local_step(
    spec: JobSpec, device: torch.device, control: ControlThread, served: ScriptedCoordinator
) -> tuple[Any, Callable[[int, Groups], dict[str, float]]]:
    """A backend in this process, and its steps."""
    backend, coefficient = build(spec, device), KlCoefficient(spec.algorithm.kl_coefficient)
    meter = MemoryMeter(spec, backend, rank=0, ranks=1)

    def step(number: int, groups: Groups) -> dict[str, float]:
        served.script.groups = groups
        request = StepRequest(job_id="job-1", step=number, groups=refs(groups), work_address=served.address)
        return train_step(spec, backend, request, control, coefficient, meter).metrics

    return backend, step


@pytest.mark.parametrize(
    ("parts", "make"),
    [
        *(pytest.param(parts, random_groups, id=name) for name, parts in JOBS.items()),
        *(pytest.param(JOBS[name], episode_groups, id=f"{name}, episodes") for name in OF_EPISODES),
    ],
)
def test_equals_plain_pytorch(
    parts: dict[str, Any],
    make: Callable[..., Groups],
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
) -> None:
    trainer = {"token_budget": 64, "optimizer": OPTIMIZER, **parts.get("trainer", {})}
    spec = job_spec(untied_model, **{**parts, "trainer": trainer})
    backend, step = local_step(spec, one_rank, control, served)
    plain = Plain(untied_model, spec)
    for number in (1, 2, 3):
        groups = make(4, 4, seed=number)
        metrics = step(number, groups)
        plain.step(list(groups.values()), learning_rate(spec, number))
        assert metrics["actor/pg_loss"] == pytest.approx(sum(plain.losses) / len(plain.losses), rel=1e-4, abs=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(sum(plain.norms) / len(plain.norms), rel=1e-4)
        if plain.kl_losses:
            assert metrics["actor/kl_loss"] == pytest.approx(sum(plain.kl_losses) / len(plain.kl_losses), rel=1e-3)
    trained = dict(plain.model.named_parameters())
    for info, tensor in backend.export("float32"):
        torch.testing.assert_close(tensor, trained[info.name].detach(), atol=2e-5, rtol=1e-4)


def test_metrics(one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path) -> None:
    _, step = local_step(job_spec(tied_model), one_rank, control, served)
    groups = random_groups(4, 4)
    metrics = step(1, groups)
    trajectories = [t for group in groups.values() for t in group.trajectories]
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(t.reward for t in trajectories) / 16)
    tokens = sum(ref.prompt_tokens * 4 + sum(ref.response_tokens) for ref in refs(groups))
    assert metrics["batch/waste"] == pytest.approx(1 - tokens / (128 * metrics["batch/microbatches"]))
    everything = {"min", "max", "balanced_min", "balanced_max", "mean"}
    assert {metrics[f"global_seqlen/{name}"] for name in everything} == {tokens}
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/ratio_max"] == 1.0
    actor = {f"actor/{name}" for name in ("entropy", "pg_clipfrac", "lr", "pg_loss")}
    parts = {f"timing_s/{name}" for name in ("fetch", "old_log_prob", "ref", "adv", "update_actor")}
    apart = {f"training/rollout_probs_diff_{name}" for name in ("mean", "max", "std")}
    for name in actor | parts | apart | {"rollout_corr/kl", "perf/mfu/actor"}:
        assert math.isfinite(metrics[name])
    assert not {"perf/mfu/actor_infer", "perf/mfu/ref"} & metrics.keys(), "this job needs neither pass"


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_kl_coefficient_follows_its_target(
    where: str, one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    """The rule of arXiv 1909.08593 is applied to the observed KL; the loss uses the coefficient that is reported."""
    algorithm = {"kl": {"name": "k2"}, "kl_in": where, "kl_coefficient": 0.2, "kl_target": 1e-3, "kl_horizon": 40}
    spec = job_spec(tied_model, algorithm=algorithm, trainer={"optimizer": OPTIMIZER})
    _, step = local_step(spec, one_rank, control, served)
    expected = 0.2
    for number in (1, 2, 3, 4):
        metrics = step(number, random_groups(4, 4, seed=number))
        assert metrics["actor/kl_coef"] == pytest.approx(expected)
        error = min(max(metrics["actor/reference_kl"] / 1e-3 - 1, -0.2), 0.2)
        expected *= 1 + error * 16 / 40
        assert (metrics["actor/reference_kl"] > 0) is (number > 1)
    assert expected != 0.2


def test_an_empty_response_trains_nothing(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    spec = job_spec(tied_model, trainer={"token_budget": 64})
    _, step = local_step(spec, one_rank, control, served)
    groups = random_groups(4, 4)
    for trajectory in (next(iter(groups.values())).trajectories[1], list(groups.values())[2].trajectories[0]):
        trajectory.tokens = trajectory.logprobs = b""
    assert math.isfinite(step(1, groups)["actor/pg_loss"])


def test_rejected_sequences_count_in_the_mean_over_sequences_unless_told_otherwise(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    """As in verl and NeMo-RL the mean is over all sequences; with the option it is over those that are kept."""
    losses, rejected = {}, 0.0
    for counted in (True, False):
        algorithm = {
            "aggregation": "seq-mean-token-mean",
            "correction": {"name": "reject_sequence_sum", "options": {"estimator": "k2", "limit": 4.0}},
            "count_rejected_sequences": counted,
        }
        _, step = local_step(job_spec(tied_model, algorithm=algorithm), one_rank, control, served)
        metrics = step(1, random_groups(4, 4))
        losses[counted], rejected = metrics["actor/pg_loss"], metrics["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert 0.2 < rejected < 0.8 and abs(losses[False]) > 1e-3
    assert losses[True] == pytest.approx(losses[False] * (1 - rejected), rel=1e-4)


def poisoned_reward(groups: Groups) -> str:
    prompt_id = list(groups)[2]
    groups[prompt_id].trajectories[1].reward = float("nan")
    return f"rewards.*prompt {prompt_id}, sample 1"


def poisoned_logprob(groups: Groups) -> str:
    prompt_id = list(groups)[1]
    trajectory = groups[prompt_id].trajectories[3]
    trajectory.logprobs = pack_logprobs([float("-inf")] * (len(trajectory.tokens) // 4))
    return f"log-probabilities of the engine.*prompt {prompt_id}, sample 3"


def poisoned_advantage(groups: Groups) -> str:
    """Rewards that are numbers, whose sum is none."""
    prompt_id = list(groups)[2]
    for trajectory in groups[prompt_id].trajectories[:2]:
        trajectory.reward = 1.7e308
    return f"advantages: (nan|-?inf) at token 0 of trajectory prompt {prompt_id}, sample 0"


@pytest.mark.parametrize("poison", [poisoned_reward, poisoned_logprob, poisoned_advantage])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_number_that_is_none_stops_the_step(
    poison: Callable[[Groups], str],
    updates: int,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
) -> None:
    spec = job_spec(tied_model, trainer={"updates_per_step": updates, "optimizer": OPTIMIZER})
    backend, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4))
    before = {name: tensor.full_tensor().clone() for name, tensor in backend.state().items()}
    groups = random_groups(4, 4, seed=1)
    with pytest.raises(NonFinite, match=poison(groups)) as raised:
        step(2, groups)
    assert type(raised.value) is NonFinite
    for name, tensor in backend.state().items():
        assert torch.equal(tensor.full_tensor(), before[name]), name
    assert math.isfinite(step(2, random_groups(4, 4, seed=2))["actor/grad_norm"])


def test_a_bad_gradient_names_its_trajectory_and_gives_up_a_partial_step(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of two updates has a gradient that overflows: nothing of it is written, and the first is told of."""
    spec = job_spec(tied_model, trainer={"updates_per_step": 2, "optimizer": OPTIMIZER})
    backend, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4))
    groups = random_groups(4, 4, seed=1)
    prompt_id = list(groups)[3]
    bad = torch.frombuffer(bytearray(groups[prompt_id].trajectories[2].tokens), dtype=torch.int32).long()
    forward_backward = backend.forward_backward

    def overflowing(microbatches: Any, loss_fn: Any, **rest: Any) -> Any:
        def explode(batch: Any, scores: Any) -> Any:
            loss, output = loss_fn(batch, scores)
            for part in batch.targets_r.split(list(batch.sampled_lengths)):
                if torch.equal(part, bad):
                    loss = loss + (scores.logprobs_r.sum() * 1e38) * 1e38
            return loss, output

        return forward_backward(microbatches, explode, **rest)

    monkeypatch.setattr(backend, "forward_backward", overflowing)
    with pytest.raises(PartialStep, match=f"gradients.*prompt {prompt_id}, sample 2") as raised:
        step(2, groups)
    assert raised.value.fix.startswith(GIVEN_UP) and UNCHANGED not in raised.value.fix and backend.updates == 3
    assert all(tensor.full_tensor().isfinite().all() for tensor in backend.state().values())


def no_reward(groups: Groups) -> str:
    first = next(iter(groups.values()))
    first.trajectories[0].ClearField("reward")
    first.trajectories[0].reward_failure = "ValueError: boom"
    return "sample 0 cannot be trained: it has no reward: ValueError: boom"


def fewer_logprobs(groups: Groups) -> str:
    trajectory = next(iter(groups.values())).trajectories[2]
    trajectory.logprobs = trajectory.logprobs[:-4]
    return "sample 2 cannot be trained: it has .* log-probabilities"


@pytest.mark.parametrize("spoil", [no_reward, fewer_logprobs])
def test_refuses_trajectories_that_are_not_whole(
    spoil: Callable[[Groups], str],
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
) -> None:
    _, step = local_step(job_spec(tied_model), one_rank, control, served)
    groups = random_groups(4, 4)
    words = spoil(groups)
    with pytest.raises(InvalidState, match=words):
        step(1, groups)


def test_refuses_lengths_that_differ_from_those_announced(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    spec = job_spec(tied_model)
    backend = build(spec, one_rank)
    served.script.groups = random_groups(4, 4, seed=1)
    announced = refs(served.script.groups)
    announced[1].response_tokens[3] += 1
    request = StepRequest(job_id="job-1", step=1, groups=announced, work_address=served.address)
    with pytest.raises(InvalidState, match=f"prompt {announced[1].prompt_id}, sample 3 cannot be trained"):
        train_step(spec, backend, request, control, KlCoefficient(0.0), MemoryMeter(spec, backend, 0, 1))


def test_the_flops_of_a_tower_are_those_of_the_part_that_first_needed_an_image(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All samples of a prompt have its image, and a second step with the same images needs the tower no more."""
    folder, told = save_image_model(tmp_path / "model"), list[dict[str, float]]()
    images = {"files": ["/rows.jsonl"], "procedural": None, "images": {"max_per_prompt": 1}, "max_prompt_tokens": 64}
    trainer = {"token_budget": 512, "optimizer": {"lr": 0.0}}
    _, step = local_step(job_spec(folder, data=images, trainer=trainer), one_rank, control, served)
    groups, pictures, expected = random_groups(2, 4), Pictures.of_folder(str(folder)), 0.0
    tower = decoder_shape(folder).tower
    for number, group in enumerate(groups.values()):
        file = picture(number, 60 + 30 * number, 90)
        group.images[:] = [file]
        group.prompt_tokens = pack_tokens(pictures.expanded([START, PAD, END, 7], pictures.opened([file])))
        (grid,) = pictures.pixels(pictures.opened([file]))[1].tolist()
        assert tower is not None
        expected += tower.flops(tuple(grid))

    def watched(*arguments: Any) -> dict[str, float]:
        told.append(arguments[-1])
        return {}

    monkeypatch.setattr(step_module, "utilisation", watched)
    for number in (1, 2):
        step(number, groups)
    assert sum(told[0].values()) == pytest.approx(expected) == max(told[0].values())
    assert set(told[1].values()) == {0.0}
