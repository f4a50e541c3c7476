"""From groups of agents to the losses: every advantage and every loss against its slow reference, on episodes with
gaps, several trajectories and rewards of turns, whatever the micro-batches."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.contracts.v1 import common_pb2
from millrace.errors import InvalidState
from millrace.rl.registry.catalogue import AGGREGATIONS, AlgorithmKind, find, names
from millrace.sequence_cost import SequenceCost
from millrace.spec import JobSpec
from millrace.wire.arrays import pack_logprobs, unpack_logprobs
from services.trainer.algorithms.aggregation import BatchTotals, combined
from services.trainer.protocol.backend import DataParallel, TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.step.batch import BatchDivision, RankBatch, StepShares, TrajectoryRef
from services.trainer.step.fetch import _sample
from services.trainer.step.forward_passes import ForwardResults
from services.trainer.step.loss import ActorLoss, LossOutput
from services.trainer.step.loss_inputs import LossInputs, make_loss_inputs
from tests.rl import reference_advantages, reference_losses
from tests.rl.reference_advantages import Answer
from tests.rl.reference_losses import Tokens
from tests.services.trainer.algorithms.test_aggregation import HORIZON, slow
from tests.services.trainer.groups import episode_groups, job_spec, refs

Groups = dict[str, common_pb2.Group]
OPTIONS: dict[str, dict[str, Any]] = {"passk": {"k": 2}, "gae": {"gamma": 0.9, "lam": 0.8}}
"""Options of advantages; the others have none."""


@dataclass(frozen=True)
class Ranks:
    """What a division asks of a backend."""

    cost = SequenceCost()
    data_parallel = DataParallel(0, 1, None)


@dataclass(frozen=True)
class Trajectory:
    """A trajectory of a group with what models said of its sampled tokens, as plain lists."""

    group: int
    episode: int
    message: common_pb2.Trajectory
    ref: TrajectoryRef

    def said(self, what: int) -> list[float]:
        """Made-up scores of the sampled tokens, which differ from token to token."""
        turns = [(turn.start, turn.end) for turn in self.message.turns] or [(0, len(self.message.tokens) // 4)]
        at = [place for start, end in turns for place in range(start, end)]
        random = np.random.default_rng([what, self.group, self.ref.sample])
        return random.normal(size=32)[at].tolist()

    @cached_property
    def old(self) -> list[float]:
        return [-abs(value) - 0.1 for value in self.said(1)]

    @cached_property
    def now(self) -> list[float]:
        return [min(old + 0.3 * step, -0.01) for old, step in zip(self.old, self.said(2), strict=True)]

    @property
    def rewards(self) -> list[float]:
        """Rewards of its sampled tokens."""
        rewards: list[float] = []
        for turn in self.message.turns:
            rewards += [0.0] * (turn.end - turn.start - 1) + [turn.reward]
        rewards[-1] += self.message.reward
        return rewards


class Step:
    """A step on groups of agents, with made-up scores in place of a model's."""

    def __init__(self, spec: JobSpec, groups: Groups, token_budget: int = 96) -> None:
        self.spec, parts = spec, list(spec.reward.parts)
        division = BatchDivision.of(refs(groups), Ranks(), StepShares.of(len(groups), 1), token_budget=token_budget)  # type: ignore[arg-type]
        samples = [_sample(division.trajectories[i], groups[division.trajectories[i].prompt_id], parts)
                   for i in division.indices(0)]  # fmt: skip
        self.batch = RankBatch(division, samples, Ranks.data_parallel, torch.device("cpu"))
        self.trajectories = list(self._trajectories(groups, division))

    def _trajectories(self, groups: Groups, division: BatchDivision) -> Iterator[Trajectory]:
        refs = iter(division.trajectories)
        for number, group in enumerate(groups.values()):
            episodes = [e for e, size in enumerate(group.episode_trajectories) for _ in range(size)]
            for episode, message in zip(episodes, group.trajectories, strict=True):
                yield Trajectory(number, episode, message, next(refs))

    def scored(self, rows: list[list[float]]) -> Tensor:
        return self.batch.pad(torch.tensor([value for row in rows for value in row]))

    def inputs(self) -> LossInputs:
        """The inputs of the losses."""
        old_bt = self.scored([one.old for one in self.trajectories])
        squares_bt = (1.5 * old_bt).exp()
        passes = ForwardResults(old_bt, None, self.scored([one.said(3) for one in self.trajectories]), squares_bt)
        return make_loss_inputs(self.spec, self.batch, passes)[0]

    def loss(self, inputs: LossInputs) -> tuple[float, dict[str, Tensor]]:
        """The loss and its metrics, over the micro-batches of the step."""
        loss_fn = ActorLoss(self.spec, inputs, BatchTotals.of(inputs.mask_bt))
        total, told = 0.0, []
        for batch in self.batch.updates[0]:
            now_r = torch.tensor([value for row in batch.rows for value in self.trajectories[row].now])
            output: LossOutput
            loss, output = loss_fn(batch, TokenScores(now_r, now_r.abs()))
            total += float(loss)
            told.append(output.metrics)
        return total, combined(told)

    def answers(self, groups: Groups) -> list[Answer]:
        """The episodes, as the slow estimators take them."""
        answers: dict[tuple[int, int], Answer] = {}
        for one, group in zip(
            self.trajectories, [list(groups.values())[t.group] for t in self.trajectories], strict=True
        ):
            answer = answers.setdefault((one.group, one.episode), Answer(one.group, [], greedy=group.greedy_reward))
            answer.rewards += one.rewards
            answer.values += one.said(3)
            answer.old_logprobs += one.old
            answer.sum_pi_squared += [np.exp(1.5 * old) for old in one.old]
            answer.turns += [turn.end - turn.start for turn in one.message.turns]
            details = json.loads(one.message.reward_details or "{}")
            if "format" in details:
                answer.several_rewards = [one.message.reward, details["format"]]
        return list(answers.values())

    def by_episode(self, rows: list[list[float]]) -> list[list[float]]:
        """Rows of trajectories, those of an episode joined."""
        joined: dict[tuple[int, int], list[float]] = {}
        for one, row in zip(self.trajectories, rows, strict=True):
            joined.setdefault((one.group, one.episode), []).extend(row)
        return list(joined.values())

    def rows(self, values_bt: Tensor) -> list[list[float]]:
        return [row[: len(one.old)].tolist() for row, one in zip(values_bt, self.trajectories, strict=True)]


def spec_of(tmp_path: Path, **algorithm: Any) -> JobSpec:
    several = {"parts": ["score", "format"]} if algorithm.get("advantage", {}).get("name") == "gdpo" else {}
    return job_spec(tmp_path, algorithm=algorithm, reward=several, rollout={"max_response_tokens": HORIZON})


@pytest.mark.parametrize("name", names(AlgorithmKind.ADVANTAGE))
@given(seed=st.integers(0, 2**16))
@settings(max_examples=15)
def test_every_advantage_equals_its_slow_reference(name: str, seed: int) -> None:
    """Baselines count episodes, and what is summed up skips what was given and goes on to the next trajectory."""
    options = OPTIONS.get(name, {})
    critic = {"critic": {}} if find(AlgorithmKind.ADVANTAGE, name).needs_critic else {}
    spec = spec_of(Path("/models/1"), advantage={"name": name, "options": options}, **critic)
    groups = episode_groups(3, 3, seed=seed)
    step = Step(spec, groups)
    expected = getattr(reference_advantages, name)(step.answers(groups), **options)
    expected = expected if isinstance(expected, tuple) else (expected, expected)
    inputs = step.inputs()
    found = [
        step.rows(inputs.advantages_bt),
        *([step.rows(inputs.returns_bt)] if inputs.returns_bt is not None else []),
    ]
    for rows, slowly in zip(found, expected, strict=False):
        for got, want in zip(step.by_episode(rows), slowly, strict=True):
            assert got == pytest.approx(want, rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("name", [n for n in names(AlgorithmKind.POLICY_LOSS) if n not in ("clip_cov", "kl_cov")])
@given(seed=st.integers(0, 2**16), aggregation=st.sampled_from(AGGREGATIONS), budget=st.sampled_from((40, 64, 4096)))
@settings(max_examples=15)
def test_every_loss_equals_its_slow_reference(name: str, seed: int, aggregation: str, budget: int) -> None:
    """The sequences of a loss are trajectories; its tokens are those that were sampled."""
    spec = spec_of(Path("/models/1"), policy_loss={"name": name}, aggregation=aggregation)
    step = Step(spec, episode_groups(3, 3, seed=seed), budget)
    inputs = step.inputs()
    advantages = step.rows(inputs.advantages_bt)
    sequences = [
        Tokens(one.now, one.now, one.old, unpack_logprobs(one.message.logprobs).tolist(), row)
        for one, row in zip(step.trajectories, advantages, strict=True)
    ]
    rows = getattr(reference_losses, name)(sequences)
    loss, metrics = step.loss(inputs)
    assert loss == pytest.approx(slow(aggregation, rows), rel=1e-3, abs=1e-4)
    moved = [now - old for one in step.trajectories for now, old in zip(one.now, one.old, strict=True)]
    assert float(metrics["approx_kl"]) == pytest.approx(-sum(moved) / len(moved), rel=1e-3, abs=1e-4)
    entropies = [abs(now) for one in step.trajectories for now in one.now]
    assert float(metrics["entropy"]) == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_losses_that_choose_tokens_of_the_step_do_not_depend_on_the_packing(name: str, seed: int) -> None:
    spec = spec_of(Path("/models/1"), policy_loss={"name": name})
    losses = []
    for budget in (40, 4096):
        step = Step(spec, episode_groups(3, 3, seed=seed), budget)
        losses.append(step.loss(step.inputs())[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)


@given(seed=st.integers(0, 2**16))
@settings(max_examples=25)
def test_the_tokens_scored_are_the_tokens_sampled(seed: int) -> None:
    """Targets, and the places before them, of every packed sequence."""
    groups = episode_groups(2, 3, seed=seed)
    step = Step(spec_of(Path("/models/1")), groups, token_budget=64)
    seen = 0
    for batch in step.batch.updates[0]:
        ends = np.cumsum(batch.lengths)
        for row, places_r in zip(batch.rows, batch.predicting_r.split(list(batch.sampled_lengths)), strict=True):
            one, first = step.trajectories[row], int(ends[batch.rows.index(row)]) - batch.lengths[batch.rows.index(row)]
            prompt = np.frombuffer(one.message.prompt_tokens or groups[one.ref.prompt_id].prompt_tokens, np.int32)
            whole = np.concatenate([prompt, np.frombuffer(one.message.tokens, np.int32)])
            sampled = [len(prompt) + at for turn in one.message.turns for at in range(turn.start, turn.end)]
            assert (places_r - first + 1).tolist() == sampled
            assert batch.tokens_p[first : first + len(whole)].tolist() == whole.tolist()
            assert batch.tokens_p[places_r + 1].tolist() == whole[sampled].tolist()
            seen += len(sampled)
        padded: MicroBatch = batch.padded(7)
        assert padded.predicting_r.equal(batch.predicting_r) and padded.targets_r.equal(batch.targets_r)
    assert seen == sum(len(one.old) for one in step.trajectories)


def test_a_trajectory_that_is_not_as_announced_is_refused() -> None:
    groups = episode_groups(1, 2, seed=5)
    ((prompt, group),) = groups.items()
    (ref, *_) = BatchDivision.of(refs(groups), Ranks(), StepShares.of(len(groups), 1), token_budget=96).trajectories  # type: ignore[arg-type]
    sound = common_pb2.Group.FromString(group.SerializeToString())

    def refused(match: str) -> common_pb2.Trajectory:
        """Answers the sound trajectory, to be spoilt in another way."""
        with pytest.raises(InvalidState, match=match):
            _sample(ref, group, ())
        group.CopyFrom(sound)
        return group.trajectories[0]

    assert _sample(ref, group, ()).sampled_tokens == ref.sampled_tokens
    first, tokens = group.trajectories[0], ref.sampled_tokens
    first.logprobs += pack_logprobs([-1.0])
    first = refused(rf"{prompt}, sample 0 .* {tokens} sampled tokens but {tokens + 1}")
    first.turns[-1].end = ref.response_tokens + 1
    first = refused(f"end at {ref.response_tokens + 1} of {ref.response_tokens} response tokens")
    first.turns[-1].end += 1
    first = refused(f"has {tokens + 1} sampled tokens, not {tokens}")
    first.turns.add(start=0, end=1)
    refused("its turns do not follow each other")
