"""A real step with everything that a job may name: numbers are finite, weights move, and with learning rate 0 nothing
does. One model for all; the steps are the trainer's own."""

import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace.admission import choices
from millrace.contracts.v1 import common_pb2
from millrace.contracts.v1.trainer_pb2 import StepRequest
from millrace.errors import InvalidJob, PartialStep
from millrace.rl.registry.catalogue import AGGREGATIONS, KL_ESTIMATORS, AlgorithmKind, names
from millrace.spec import JobSpec, presets
from millrace.wire.arrays import TokenScores, pack_logprobs, unpack_tokens
from services.trainer.algorithms.functions import load_algorithms, load_file
from services.trainer.backends import build
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend
from services.trainer.protocol.microbatch import MicroBatch, Sample
from services.trainer.ranks.commands import ControlThread
from services.trainer.step import loss_inputs
from services.trainer.step.schedule import KlCoefficient
from services.trainer.step.step import UNCHANGED
from tests.rl import reference_advantages
from tests.rl.reference_advantages import Answer
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator
from tests.services.trainer.groups import job_spec, random_groups, refs
from tests.services.trainer.steps import train_step

pytestmark = pytest.mark.slow

REWARDS = ((1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (0.5, 0, 1, 0))
"""Rewards of four groups that every estimator can distinguish."""
TEACHER_TOP = 3
LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {"aggregation": "seq-mean-token-mean"},
    "sapo": {"aggregation": "seq-mean-token-mean"},
    "gmpo": {"aggregation": "seq-mean-token-mean"},
    "gpg": {"advantage": {"name": "gpg"}},
    "dppo_tv": {"old_logprobs": "rollout"},
    "dppo_kl": {"old_logprobs": "rollout"},
}
"""Settings that a policy loss needs; other losses use grpo and a mean over tokens."""
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"critic": {"optimizer": {"weight_decay": 0.0}}},
    "gpg": {"policy_loss": {"name": "gpg"}},
    "passk": {"advantage": {"name": "passk", "options": {"k": 2}}},
}
"""Settings that an estimator needs; other estimators use the loss of ppo."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{
        f"advantage {name}": {"advantage": {"name": name}, **ESTIMATORS.get(name, {})}
        for name in names(AlgorithmKind.ADVANTAGE)
    },
    **{
        f"loss {name}": {"policy_loss": {"name": name}, **LOSSES.get(name, {})}
        for name in names(AlgorithmKind.POLICY_LOSS)
    },
    **{f"correction {name}": {"correction": {"name": name}} for name in names(AlgorithmKind.CORRECTION)},
    **{
        f"distillation {name}": {"distillation": {"pool": "teacher", "loss": name, "top_k": TEACHER_TOP}}
        for name in names(AlgorithmKind.DISTILLATION)
    },
    "distillation beside rewards": {
        "distillation": {"pool": "teacher", "coefficient": 0.5, "use_rewards": True},
        "correction": "tis_token",
    },
    "corrections together": {
        "correction": ["tis_sequence", "reject_token", "reject_sequence_mean"],
        "normalize_correction_weights": True,
    },
    "tokens of high entropy": {"top_entropy_fraction": 0.2, "correction": "tis_token"},
    "off-policy answers": {"off_policy_limit": 1e-4},
    **{f"aggregation {name}": {"aggregation": name} for name in AGGREGATIONS},
    **{f"kl {name} in the loss": {"kl": {"name": name}} for name in KL_ESTIMATORS},
    **{f"kl {name} in the reward": {"kl": {"name": name}, "kl_in": "reward"} for name in ("k1", "k2", "k3", "abs")},
    **{f"preset {name}": {"preset": name} for name in presets.names()},
}


@dataclass
class Trainer:
    folder: Path
    backend: Backend
    control: ControlThread
    served: ScriptedCoordinator

    def spec(self, algorithm: dict[str, Any], lr: float) -> JobSpec:
        if "critic" in algorithm or algorithm.get("preset") == "ppo":
            own = algorithm.get("critic", {})
            algorithm = {**algorithm, "critic": {**own, "optimizer": {**own.get("optimizer", {}), "lr": lr}}}
        several = {"parts": ["score", "format"]} if algorithm.get("advantage", {}).get("name") == "gdpo" else {}
        spec = job_spec(
            self.folder,
            algorithm=algorithm,
            reward=several,
            **with_teacher(self.folder, algorithm),
            trainer={"token_budget": 128, "optimizer": {"lr": lr, "weight_decay": 0.0}},
        )
        choices.check(spec)
        return spec

    def step(self, spec: JobSpec, groups: dict[str, common_pb2.Group], number: int = 1) -> dict[str, float]:
        if not choices.teacher_top(spec):
            for trajectory in (each for group in groups.values() for each in group.trajectories):
                trajectory.teacher.ClearField("top_tokens")
                trajectory.teacher.ClearField("top_logprobs")
        self.served.script.groups = groups
        request = StepRequest(job_id="job-1", step=number, groups=refs(groups), work_address=self.served.address)
        coefficient = KlCoefficient(spec.algorithm.kl_coefficient)
        meter = MemoryMeter(spec, self.backend, rank=0, ranks=1)
        return train_step(spec, self.backend, request, self.control, coefficient, meter).metrics

    def weights(self) -> list[Tensor]:
        assert self.backend.critic is not None
        states = [*self.backend.state().items(), *self.backend.critic.state().items()]
        return [t.full_tensor().clone() for name, t in states if name.startswith("model.")]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def running(tied_model: Path) -> Iterator[Trainer]:
    """A trainer with a reference and a critic, which jobs without them do not use."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    control = ControlThread()
    try:
        backend = build(job_spec(tied_model, algorithm={"preset": "ppo"}), torch.device("cpu"))
        with coordinator() as served:
            yield Trainer(tied_model, backend, control, served)
    finally:
        control.stop()
        dist.destroy_process_group()


def with_teacher(folder: Path, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The pool of a job that distils; the groups have the teacher's scores already."""
    return {"pools": [{"name": "teacher", "path": str(folder)}]} if "distillation" in algorithm else {}


def scored_groups(backend: Backend, seed: int = 0) -> dict[str, common_pb2.Group]:
    """Groups of an engine whose log-probabilities differ a little from the trainer's."""
    groups, noise = random_groups(4, 4, seed=seed), np.random.default_rng(seed)
    for group, rewards in zip(groups.values(), REWARDS, strict=True):
        prompt, samples = unpack_tokens(group.prompt_tokens), []
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            trajectory.reward = reward
            response = unpack_tokens(trajectory.tokens)
            samples.append(Sample("", prompt, response, np.zeros(len(response), np.float32), 0.0))
        batch = MicroBatch.pack(samples, range(len(samples)))
        (logprobs_r,) = backend.logprobs([batch], temperature=1.0)
        for trajectory, part in zip(group.trajectories, logprobs_r.split(list(batch.sampled_lengths)), strict=True):
            trajectory.logprobs = pack_logprobs((part.numpy() + 1e-3 * noise.standard_normal(len(part))).tolist())
            trajectory.teacher.CopyFrom(random_scores(part.numpy(), noise).message())
    return groups


def random_scores(logprobs_n: NDArray[np.float32], random: np.random.Generator) -> TokenScores:
    """A teacher that differs from the policy, and prefers random tokens."""
    tokens_nk = np.stack([random.choice(256, TEACHER_TOP, replace=False) for _ in logprobs_n]).astype(np.int32)
    shares_nk = np.log(np.tile(np.asarray([0.5, 0.2, 0.1], np.float32), (len(logprobs_n), 1)))
    return TokenScores(logprobs_n + random.standard_normal(len(logprobs_n)).astype(np.float32), tokens_nk, shares_nk)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_moves_the_weights(name: str, running: Trainer) -> None:
    groups, before = scored_groups(running.backend), running.weights()
    metrics = running.step(running.spec(ALGORITHMS[name], lr=1e-3), groups)
    assert not all(torch.equal(a, b) for a, b in zip(before, running.weights(), strict=True))
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["actor/grad_norm"] > 0


PRESETS = [name for name in ALGORITHMS if name.startswith("preset ")]
"""They have each part of a step: rewards in the loss and out of it, a critic, several updates."""
REST = [pytest.param(name, marks=pytest.mark.matrix) for name in ALGORITHMS if name not in PRESETS]


@pytest.mark.parametrize("name", [*PRESETS, *REST])
def test_a_step_with_learning_rate_0_moves_nothing_and_tells_the_same(name: str, running: Trainer) -> None:
    groups, before = scored_groups(running.backend), running.weights()
    still = running.step(running.spec(ALGORITHMS[name], lr=0.0), groups)
    assert all(torch.equal(a, b) for a, b in zip(before, running.weights(), strict=True))
    moved = running.step(running.spec(ALGORITHMS[name], lr=1e-3), groups)
    assert all(math.isfinite(value) for value in still.values()), still
    assert still["actor/grad_norm"] > 0
    assert still["actor/pg_loss"] == pytest.approx(moved["actor/pg_loss"], rel=1e-5, abs=1e-7)


def test_the_loss_of_the_contributors_page_trains(running: Trainer, tmp_path: Path) -> None:
    """The loss is in a file that the job names."""
    page = (Path(__file__).parents[4] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def softened" in block)
    (tmp_path / "softened.py").write_text(code)
    name = f"{tmp_path / 'softened.py'}:softened"
    groups, before = scored_groups(running.backend), running.weights()
    losses = []
    for negative in (0.5, 0.0):
        loss = {"name": name, "options": {"negative": negative}}
        metrics = running.step(running.spec({"policy_loss": loss}, lr=0.0), groups)
        assert 0.2 < metrics["actor/softened_fraction"] < 0.8
        losses.append(metrics["actor/pg_loss"])
    assert losses[0] != losses[1]
    running.step(running.spec({"policy_loss": {"name": name}}, lr=1e-3), groups)
    assert not all(torch.equal(a, b) for a, b in zip(before, running.weights(), strict=True))
    with pytest.raises(InvalidJob, match=r"negative: 2\.0: is more than 1"):
        running.spec({"policy_loss": {"name": name, "options": {"negative": 2.0}}}, lr=0.0)


FAILING = """
from torch import Tensor

calls = []


def mine(*, logprobs_bt: Tensor, advantages_bt: Tensor):
    calls.append(1)
    assert len(calls) != FAILS_AT, "no more"
    return -logprobs_bt * advantages_bt, {}
"""


def test_a_loss_that_fails_leaves_nothing_behind(running: Trainer, tmp_path: Path) -> None:
    """A failure in the first update: no weight has changed, and no gradient is left. In the second: the first is
    made."""
    path = tmp_path / "mine.py"

    def fails_at(call: int | None) -> None:
        path.write_text(FAILING.replace("FAILS_AT", str(call)))
        load_algorithms([])

    fails_at(None)
    still, moving = (running.spec({"policy_loss": f"{path}:mine"}, lr=lr) for lr in (0.0, 1e-3))
    moving = moving.model_copy(update={"trainer": moving.trainer.model_copy(update={"updates_per_step": 2})})
    running.step(moving, scored_groups(running.backend))
    calls = len(load_file(path).calls)
    groups, before = scored_groups(running.backend), running.weights()
    expected = running.step(still, groups)
    fails_at(1)
    told = r"algorithm\.policy_loss\.name: mine failed at .*mine\.py:9: AssertionError"
    with pytest.raises(InvalidJob, match=told) as raised:
        running.step(moving, groups)
    assert all(torch.equal(a, b) for a, b in zip(before, running.weights(), strict=True))
    assert raised.value.fix.startswith(UNCHANGED)
    fails_at(None)
    assert running.step(still, groups)["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-6)
    fails_at(calls)
    with pytest.raises(PartialStep, match=told):
        running.step(moving, groups)


@dataclass
class Scored:
    """A trajectory: its advantage by grpo, and log-probability and entropy of each of its tokens."""

    advantage: float
    logprobs: list[float]
    entropies: list[float]


def scored(running: Trainer, groups: dict[str, common_pb2.Group]) -> Iterator[Scored]:
    """The trajectories of all groups, each scored alone."""
    for group, rewards in zip(groups.values(), REWARDS, strict=True):
        prompt = unpack_tokens(group.prompt_tokens)
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            response = unpack_tokens(trajectory.tokens)
            sample = Sample("", prompt, response, np.zeros(len(response), np.float32), 0.0)
            (scores,) = running.backend.scores([MicroBatch.pack([sample], [0])], temperature=1.0)
            assert scores.entropy_r is not None
            advantage = (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            yield Scored(advantage, scores.logprobs_r.tolist(), scores.entropy_r.tolist())


def test_only_tokens_of_high_entropy_have_a_policy_loss(running: Trainer) -> None:
    """All tokens stay in the divisor. With one update π = π_old, so the loss of a token is −A."""
    groups = scored_groups(running.backend, seed=3)
    metrics = running.step(running.spec({"top_entropy_fraction": 0.3}, lr=0.0), groups)
    tokens = [(each.advantage, entropy) for each in scored(running, groups) for entropy in each.entropies]
    kept = sorted(tokens, key=lambda token: -token[1])[: int(0.3 * (len(tokens) - 1)) + 1]
    assert metrics["actor/pg_loss"] == pytest.approx(-sum(a for a, _ in kept) / len(tokens), rel=1e-4, abs=1e-6)
    assert metrics["actor/top_entropy_threshold"] == pytest.approx(kept[-1][1], rel=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(statistics.fmean(entropy for _, entropy in tokens), rel=1e-5)


def test_bad_answers_that_the_policy_has_left_have_no_policy_loss(running: Trainer) -> None:
    """The engine gave every second answer 0.5 nats a token more than the policy does now."""
    groups = scored_groups(running.backend, seed=4)
    trajectories = [trajectory for group in groups.values() for trajectory in group.trajectories]
    answers = list(scored(running, groups))
    for number, (trajectory, answer) in enumerate(zip(trajectories, answers, strict=True)):
        trajectory.logprobs = pack_logprobs([logprob + 0.5 * (number % 2) for logprob in answer.logprobs])
    total = sum(len(answer.logprobs) for answer in answers)
    for limit, masks in ((0.4, True), (0.6, False)):
        metrics = running.step(running.spec({"off_policy_limit": limit}, lr=0.0), groups)
        masked = [answer for answer in answers[1::2] if masks and answer.advantage < 0]
        share = sum(len(answer.logprobs) for answer in masked) / total
        loss = -sum(each.advantage * len(each.logprobs) for each in answers if each not in masked) / total
        assert metrics["actor/off_policy_fraction"] == pytest.approx(share, abs=1e-7)
        assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert (share > 0.1) is masks


def squared_probabilities(folder: Path, backend: Backend, group: common_pb2.Group) -> list[list[tuple[float, float]]]:
    """At each response token its log-probability and Σπ², of each sequence alone through transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    exported = {info.name: tensor for info, tensor in backend.export("float32") if tensor is not None}
    model.load_state_dict({name: tensor.double() for name, tensor in exported.items()}, strict=False)
    prompt, found = np.frombuffer(group.prompt_tokens, np.int32), []
    for trajectory in group.trajectories:
        response = np.frombuffer(trajectory.tokens, np.int32)
        tokens = torch.tensor(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            probabilities = model(input_ids=tokens[None]).logits[0].softmax(-1)[len(prompt) - 1 : -1]
        chosen = probabilities[torch.arange(len(response)), torch.tensor(response).long()]
        pairs = zip(chosen.log().tolist(), probabilities.square().sum(-1).tolist(), strict=True)
        found.append(list(pairs))
    return found


@pytest.mark.parametrize("name", ["remax", "gdpo", "optimal_token_baseline"])
def test_what_an_estimator_reads_is_what_the_job_made(
    name: str, running: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers' rewards, separate rewards and squared probabilities, all the way into the loss."""
    groups, answers = scored_groups(running.backend, seed=7), []
    for number, group in enumerate(groups.values()):
        scores = squared_probabilities(running.folder, running.backend, group)
        for trajectory, pairs in zip(group.trajectories, scores, strict=True):
            answer = Answer(number, [0.0] * (len(pairs) - 1) + [trajectory.reward], greedy=group.greedy_reward)
            answer.old_logprobs, answer.sum_pi_squared = [list(column) for column in zip(*pairs, strict=True)]
            answer.several_rewards = [trajectory.reward, json.loads(trajectory.reward_details)["format"]]
            answers.append(answer)
    expected = getattr(reference_advantages, name)(answers)
    expected = expected[0] if isinstance(expected, tuple) else expected
    found: list[Tensor] = []
    advantage = loss_inputs.advantage

    def watched(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        advantages_bt, returns_bt = advantage(*arguments, **named)
        found.append(advantages_bt)
        return advantages_bt, returns_bt

    monkeypatch.setattr(loss_inputs, "advantage", watched)
    running.step(running.spec({"advantage": {"name": name}}, lr=0.0), groups)
    (advantages_bt,) = found
    for row, values in zip(advantages_bt, expected, strict=True):
        assert row[: len(values)].tolist() == pytest.approx(values, rel=1e-3, abs=1e-4)
