"""What a step tells the coordinator besides metrics, against plain PyTorch and what its losses read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.contracts.v1 import common_pb2
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.telemetry.metrics.histograms import ADVANTAGES, IMPORTANCE_RATIOS
from millrace.wire.arrays import unpack_floats, unpack_logprobs
from services.trainer.algorithms.tokens import unpack
from services.trainer.backends import build
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks.commands import ControlThread
from services.trainer.service.worker import _response
from services.trainer.step.loss import ActorLoss, LossOutput
from services.trainer.step.result import StepResult, shown_groups
from services.trainer.step.schedule import KlCoefficient
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups, refs
from tests.services.trainer.step.plain_grpo import Plain, numbered
from tests.services.trainer.steps import train_step

Groups = dict[str, common_pb2.Group]


def step_of(
    spec: JobSpec, groups: Groups, device: torch.device, control: ControlThread, served: ScriptedCoordinator
) -> StepResult:
    served.script.groups = groups
    backend = build(spec, device)
    request = pb.StepRequest(job_id="job-1", step=1, groups=refs(groups), work_address=served.address)
    return train_step(spec, backend, request, control, KlCoefficient(0.0), MemoryMeter(spec, backend, 0, 1))


@torch.no_grad()
def expected(folder: Path, spec: JobSpec, groups: Groups) -> list[tuple[Tensor, Tensor, float]]:
    """Of each trajectory the log-probabilities of its sampled tokens under the model, those of the engine, and its
    advantage."""
    plain = Plain(folder, spec)
    rows = numbered(list(groups.values()))
    tokens_bt, prompts_b, mask_bt = plain._padded(list(groups.values()), rows)
    logprobs_bt = plain._logprobs(plain.model, tokens_bt, prompts_b, mask_bt)[0]
    advantages_b = plain._advantages(rows, logprobs_bt, logprobs_bt, mask_bt)
    engine = [torch.from_numpy(unpack_logprobs(trajectory.logprobs).copy()) for _, _, trajectory in rows]
    own = (logprobs_bt[row][mask_bt[row]] for row in range(len(rows)))
    return list(zip(own, engine, advantages_b.tolist(), strict=True))


@pytest.mark.parametrize("make", [random_groups, episode_groups])
def test_histograms(
    make: Callable[..., Groups],
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
) -> None:
    spec, groups = job_spec(untied_model), make(4, 4, seed=1)
    result = step_of(spec, groups, one_rank, control, served)
    rows = expected(untied_model, spec, groups)
    ratios = np.concatenate([(own.double() - engine.double()).exp().numpy() for own, engine, _ in rows])
    assert result.histograms[IMPORTANCE_RATIOS.key] == IMPORTANCE_RATIOS.of(ratios)
    found = result.histograms[ADVANTAGES.key]
    advantages = [advantage for own, _, advantage in rows for _ in own]
    assert sum(found.counts) == len(advantages)
    assert (found.edges[0], found.edges[-1]) == pytest.approx((min(advantages), max(advantages)), rel=1e-4)


def test_only_rank_0_answers_what_is_large(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, untied_model: Path
) -> None:
    result = step_of(job_spec(untied_model), random_groups(2, 2), one_rank, control, served)
    first, second = (_response(Version(1), result, rank) for rank in (0, 1))
    assert set(first.histograms) == set(result.histograms) and not second.histograms
    assert list(first.shown) == result.shown and not second.shown
    assert first.metrics == second.metrics


CRITIC = {"optimizer": {"lr": 1e-3}}
PPO = {"preset": "ppo", "advantage": {"name": "gae", "options": {"lam": 0.9, "gamma": 0.95}}, "critic": CRITIC}
READ: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Groups]]] = {
    "grpo": ({}, {}, random_groups),
    "own pass, two updates, rejected tokens, episodes": (
        {"correction": "reject_token"},
        {"updates_per_step": 2},
        episode_groups,
    ),
    "ppo with a critic": (PPO, {}, random_groups),
    "the critic warms up": ({**PPO, "critic": {**CRITIC, "warmup_steps": 1}}, {}, episode_groups),
    "the engine's old log-probabilities, two updates": (
        {"old_logprobs": "rollout"},
        {"updates_per_step": 2},
        random_groups,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_shown_groups_have_what_the_losses_read(
    name: str,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit what the losses of all micro-batches were given."""
    algorithm, trainer, make = READ[name]
    spec = job_spec(untied_model, algorithm=algorithm, trainer={"token_budget": 64, **trainer})
    read: dict[int, tuple[Tensor, Tensor]] = {}
    updates: list[float] = []
    loss = ActorLoss.__call__

    def spy(self: ActorLoss, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, LossOutput]:
        if batch.rows:
            updates.append(self.totals.tokens)
            inputs = self.inputs.rows_of(batch)
            own_bt = unpack(scores.logprobs_r.detach(), batch.sampled_lengths)
            old_bt = own_bt if inputs.old_bt is None or spec.algorithm.old_logprobs == "rollout" else inputs.old_bt
            for at, (row, length) in enumerate(zip(batch.rows, batch.sampled_lengths, strict=True)):
                read[row] = (old_bt[at, :length], inputs.advantages_bt[at, :length])
        return loss(self, batch, scores)

    monkeypatch.setattr(ActorLoss, "__call__", spy)
    groups = make(4, 4, seed=1)
    result = step_of(spec, groups, one_rank, control, served)
    told = [trajectory for group in result.shown for trajectory in group.trajectories]
    assert [group.prompt_id for group in result.shown] == list(groups)
    assert len(told) == sum(len(group.trajectories) for group in groups.values())
    if name == "the critic warms up":
        assert not read and all(len(each.logprobs) == len(each.advantages) > 0 for each in told)
        return
    assert len(updates) > 2 and set(read) == set(range(len(told)))  # sequences were packed into several micro-batches
    first = len(told) // 2 if name.startswith("the engine") else len(told)
    for row, each in enumerate(told):
        old_t, advantages_t = read[row]
        assert np.array_equal(unpack_floats(each.advantages), advantages_t.numpy())
        assert np.array_equal(unpack_floats(each.logprobs), old_t.numpy() if row < first else [])
    assert any(len(set(unpack_floats(each.advantages))) > 1 for each in told) is ("critic" in algorithm)


def test_a_group_that_does_not_fit_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.step.result.MOST_TOKENS", 6)
    lengths = [2, 2, 1, 1, 2, 1, 1]
    groups = [
        pb.GroupRef(prompt_id="a", response_tokens=[2, 2], shown=True),
        pb.GroupRef(prompt_id="b", response_tokens=[1, 1]),
        pb.GroupRef(prompt_id="c", trajectories=[pb.TrajectoryLengths(response_tokens=9, sampled_tokens=2)]),
        pb.GroupRef(prompt_id="d", response_tokens=[1, 1], shown=True),
    ]
    values_bt = torch.arange(14.0).view(7, 2)
    known_bt = torch.ones(7, 2, dtype=torch.bool)
    known_bt[0] = False

    def told() -> list[tuple[str, list[int]]]:
        found = shown_groups(groups, lengths, values_bt, known_bt, -values_bt)
        return [(group.prompt_id, [len(each.logprobs) // 4 for each in group.trajectories]) for group in found]

    assert told() == [("a", [0, 2]), ("d", [1, 1])]
    groups[2].shown = True
    assert told() == [("a", [0, 2]), ("c", [2])]
    (first, _) = shown_groups(groups, lengths, values_bt, known_bt, -values_bt)
    assert unpack_floats(first.trajectories[1].logprobs).tolist() == [2.0, 3.0]
    assert unpack_floats(first.trajectories[0].advantages).tolist() == [0.0, -1.0]


def assert_same_shown(first: Sequence[pb.TrainedGroup], second: Sequence[pb.TrainedGroup], most: float) -> None:
    """The same groups, with values that differ by at most `most`."""
    assert [group.prompt_id for group in first] == [group.prompt_id for group in second] and first
    for one, other in zip(first, second, strict=True):
        for own, its in zip(one.trajectories, other.trajectories, strict=True):
            for values, others in ((own.logprobs, its.logprobs), (own.advantages, its.advantages)):
                assert values
                np.testing.assert_allclose(unpack_floats(values), unpack_floats(others), rtol=0, atol=most)
