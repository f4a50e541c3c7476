"""A batch: the groups of a step, or of a part of it. Its trajectories, how they are divided over the ranks, and this
rank's share as tensors.

`_bt` tensors are [rows, most sampled tokens]: tokens that the policy did not sample are in no column, so that nothing
that is computed from them can count them. The rows of a rank are its own trajectories. The rows of the whole batch are
the trajectories of all ranks: what is exact only over the whole batch is computed over it, on every rank the same.
Rewards and advantages have episodes as rows (`_et`): the sampled tokens of an episode's trajectories in their order.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from millrace.contracts.v1.trainer_pb2 import GroupRef
from millrace.engines import ENGINE_NAMES
from millrace.sequence_cost import SequenceCost
from millrace.wire.arrays import TokenScores as TeacherScores
from services.trainer.algorithms.tokens import pack, unpack
from services.trainer.protocol.backend import Backend, DataParallel
from services.trainer.protocol.microbatch import MicroBatch, Sample
from services.trainer.ranks import collectives
from services.trainer.step.planning import Plan, plan_microbatches, repack, report


@dataclass(frozen=True)
class TrajectoryRef:
    """A trajectory as the coordinator names it: by its prompt and its number among those of the prompt."""

    prompt_id: str
    sample: int
    group: int
    episode: int
    """Counted from 0 over the batch. The trajectories of an episode follow each other."""
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def label(self) -> str:
        return f"prompt {self.prompt_id}, sample {self.sample}"


@dataclass(frozen=True)
class StepShares:
    """How the groups of a step, in their order, are cut into the shares of its updates."""

    groups: int
    """Groups of the whole step."""
    updates: int

    @classmethod
    def of(cls, groups: int, updates: int) -> "StepShares":
        """The shares of `groups` in `updates`, at most as many as there are groups."""
        return cls(groups, min(updates, groups))

    def share(self, update: int) -> range:
        """The groups of an update."""
        return range(self.groups * update // self.updates, self.groups * (update + 1) // self.updates)


@dataclass(frozen=True)
class BatchDivision:
    """Which rank trains which trajectories of a batch, and in which micro-batches."""

    trajectories: tuple[TrajectoryRef, ...]
    updates: Mapping[int, Plan]
    """For each update of the step that trains groups of the batch: by rank, the micro-batches, each a list of indices
    into `trajectories`."""
    token_budget: int

    @classmethod
    def of(
        cls, groups: Sequence[GroupRef], backend: Backend, shares: StepShares, *, token_budget: int, first: int = 0
    ) -> "BatchDivision":
        """Cuts the groups into the shares of the step's updates, and balances each over the ranks by cost. `first` is
        the number of the first of the groups in the step."""
        refs, plans, ranks = _refs(groups), dict[int, Plan](), backend.data_parallel.size
        for update in range(shares.updates):
            share = shares.share(update)
            members = [index for index, ref in enumerate(refs) if first + ref.group in share]
            if not members:
                continue
            lengths = [refs[index].tokens for index in members]
            plan = plan_microbatches(lengths, ranks=ranks, token_budget=token_budget, cost=backend.cost)
            plans[update] = [[[members[at] for at in batch] for batch in batches] for batches in plan]
        return cls(refs, plans, token_budget)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory, prompt and response."""
        return [trajectory.tokens for trajectory in self.trajectories]

    @cached_property
    def sampled_lengths(self) -> list[int]:
        """Sampled tokens of each trajectory."""
        return [trajectory.sampled_tokens for trajectory in self.trajectories]

    @cached_property
    def last_of_episodes(self) -> list[int]:
        """The last trajectory of each episode."""
        episodes = [trajectory.episode for trajectory in self.trajectories]
        return [index for index, (one, after) in enumerate(pairwise([*episodes, -1])) if one != after]

    @cached_property
    def episode_lengths(self) -> list[int]:
        """Sampled tokens of each episode."""
        edges = [-1, *self.last_of_episodes]
        return [sum(self.sampled_lengths[first + 1 : last + 1]) for first, last in pairwise(edges)]

    def indices(self, rank: int) -> list[int]:
        """Indices of a rank's trajectories, ascending."""
        return sorted(index for plan in self.updates.values() for batch in plan[rank] for index in batch)

    def repacked(self, token_budget: int, cost: SequenceCost) -> dict[int, Plan]:
        """For each update the same trajectories on the same ranks, in micro-batches of another token budget."""
        return {
            update: repack(plan, self.lengths, token_budget=token_budget, cost=cost)
            for update, plan in self.updates.items()
        }


def division_metrics(divisions: Sequence[BatchDivision], backend: Backend) -> dict[str, float]:
    """How well the micro-batches of a step's parts are filled and the ranks balanced."""
    plans = [(each, plan) for each in divisions for plan in each.updates.values()]
    budget = divisions[0].token_budget
    reports = [report(plan, each.lengths, token_budget=budget, cost=backend.cost) for each, plan in plans]
    tokens = sum(len(plan) * len(plan[0]) for _, plan in plans) * budget
    return {
        "batch/token_budget": float(budget),
        "batch/parts": float(len(divisions)),
        "batch/microbatches": float(sum(r.microbatches for r in reports)),
        "batch/waste": 1 - sum(sum(each.lengths) for each in divisions) / tokens,
        "batch/imbalance": sum(r.lockstep_imbalance for r in reports) / len(reports),
        **_tokens_by_rank(divisions, backend.data_parallel.size),
    }


def _tokens_by_rank(divisions: Sequence[BatchDivision], ranks: int) -> dict[str, float]:
    """`global_seqlen/*`, verl's metrics of the tokens of a rank: dealt out in order, and as they are balanced."""
    lengths = [length for each in divisions for length in each.lengths]
    edges = [len(lengths) * rank // ranks for rank in range(ranks + 1)]
    in_order = [sum(lengths[first:last]) for first, last in pairwise(edges)]
    balanced = [sum(each.lengths[index] for each in divisions for index in each.indices(rank)) for rank in range(ranks)]
    values = {
        "min": min(in_order),
        "max": max(in_order),
        "minmax_diff": max(in_order) - min(in_order),
        "balanced_min": min(balanced),
        "balanced_max": max(balanced),
        "mean": sum(lengths) / ranks,
    }
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


def stacked(parts_bt: Sequence[Tensor]) -> Tensor:
    """The rows of all tensors, [B, T] each, padded with zeros to the longest."""
    longest = max(part_bt.shape[1] for part_bt in parts_bt)
    return torch.cat([F.pad(part_bt, (0, longest - part_bt.shape[1])) for part_bt in parts_bt])


def _refs(groups: Sequence[GroupRef]) -> tuple[TrajectoryRef, ...]:
    """The trajectories of the groups, in order. In a group without shapes each is an episode."""
    refs: list[TrajectoryRef] = []
    for number, group in enumerate(groups):
        first = refs[-1].episode + 1 if refs else 0
        for sample, tokens in enumerate(group.response_tokens):
            refs.append(
                TrajectoryRef(group.prompt_id, sample, number, first + sample, group.prompt_tokens, tokens, tokens)
            )
        for sample, one in enumerate(group.trajectories):
            lengths = (one.prompt_tokens, one.response_tokens, one.sampled_tokens)
            refs.append(TrajectoryRef(group.prompt_id, sample, number, first + one.episode, *lengths))
    return tuple(refs)


class RankBatch:
    """This rank's share of a batch, on `device`."""

    def __init__(
        self, division: BatchDivision, samples: Sequence[Sample], data_parallel: DataParallel, device: torch.device
    ) -> None:
        """`samples` are this rank's, in the order of `division.indices`."""
        self.division = division
        self.samples = samples
        self.device = device
        self._data_parallel = data_parallel
        mine = division.indices(data_parallel.rank)
        self._row_of = {index: row for row, index in enumerate(mine)}
        self.updates = self._packed(division.updates)
        """For each update the policy's micro-batches."""
        self.lengths = [division.sampled_lengths[index] for index in mine]
        self.labels = [division.trajectories[index].label for index in mine]
        self.mask_bt = self.pad(torch.ones(sum(self.lengths), dtype=torch.bool, device=device))
        rollout = [torch.tensor(sample.rollout_logprobs) for sample in samples]
        self.rollout_bt = self.pad(torch.cat([torch.zeros(0), *rollout]).to(device))

    @cached_property
    def teacher_bt(self) -> Tensor | None:
        """Log-probabilities of the sampled tokens under the teacher, [rows, longest]; None without a teacher."""
        return self._of_teacher(lambda scores: scores.logprobs_n)

    @cached_property
    def teacher_top_btk(self) -> Tensor | None:
        """Log-probabilities of the teacher's most likely tokens, [rows, longest, K]; None if it reported none."""
        top_btk = self._of_teacher(lambda scores: scores.top_logprobs_nk)
        return top_btk if top_btk is not None and top_btk.shape[-1] else None

    def _of_teacher(self, read: Callable[[TeacherScores], NDArray[np.float32]]) -> Tensor | None:
        told = [read(sample.teacher) for sample in self.samples if sample.teacher is not None]
        if not told:
            return None
        return self.pad(torch.from_numpy(np.concatenate(told)).to(self.device))

    @property
    def turn_starts_bt(self) -> Tensor:
        """The first token of each turn, bool [rows, longest]."""
        starts_bt = torch.zeros_like(self.mask_bt)
        starts_bt[:, :1] = self.mask_bt[:, :1]
        for row, sample in enumerate(self.samples):
            ends = itertools.accumulate(turn.end - turn.start for turn in sample.turns[:-1])
            starts_bt[row, list(ends)] = True
        return starts_bt

    def sampled_with_bt(self, version: int) -> Tensor:
        """The tokens that were sampled with the weights of this version, bool [rows, longest]."""
        versions = [np.full(s.sampled_tokens, -1) if s.versions is None else s.versions for s in self.samples]
        return self.pad(torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *versions])).to(self.device) == version)

    def repacked(self, token_budget: int, cost: SequenceCost) -> dict[int, list[MicroBatch]]:
        """For each update the micro-batches of a model with another token budget than the policy's."""
        if token_budget == self.division.token_budget:
            return self.updates
        return self._packed(self.division.repacked(token_budget, cost))

    def _packed(self, plans: Mapping[int, Plan]) -> dict[int, list[MicroBatch]]:
        rank = self._data_parallel.rank
        return {
            update: [MicroBatch.pack(self.samples, [self._row_of[index] for index in batch]) for batch in plan[rank]]
            for update, plan in plans.items()
        }

    @cached_property
    def whole_mask_bt(self) -> Tensor:
        """The sampled tokens of all trajectories of the batch, in the order in which the coordinator named them."""
        lengths = self.division.sampled_lengths
        return unpack(torch.ones(sum(lengths), dtype=torch.bool, device=self.device), lengths)

    @cached_property
    def group_e(self) -> Tensor:
        """The group of each episode of the batch, int64 [episodes]."""
        last = [self.division.trajectories[index] for index in self.division.last_of_episodes]
        return torch.tensor([trajectory.group for trajectory in last], device=self.device)

    def by_episode(self, whole_bt: Tensor) -> Tensor:
        """Values of the whole batch, [episodes, longest], from those of its trajectories, [trajectories, longest]."""
        if len(self.division.episode_lengths) == len(whole_bt):
            return whole_bt
        return unpack(pack(whole_bt, self.division.sampled_lengths), self.division.episode_lengths)

    def by_trajectory(self, values_et: Tensor) -> Tensor:
        """The reverse of `by_episode`."""
        if len(values_et) == len(self.division.trajectories):
            return values_et
        return unpack(pack(values_et, self.division.episode_lengths), self.division.sampled_lengths)

    @cached_property
    def whole_engine_b(self) -> Tensor:
        """The engine that generated each trajectory, as an index into `ENGINE_NAMES`; -1 for others. A collective."""
        numbers = [ENGINE_NAMES.index(s.engine) if s.engine in ENGINE_NAMES else -1 for s in self.samples]
        return self.gather_rows(torch.tensor(numbers, dtype=torch.float32, device=self.device).view(-1, 1))[:, 0].long()

    @property
    def whole_labels(self) -> list[str]:
        return [trajectory.label for trajectory in self.division.trajectories]

    def gather(self, values_bt: Tensor) -> Tensor:
        """Values of the whole batch, [trajectories, longest], from each rank's own [rows, longest]. A collective."""
        shares = [self.division.indices(rank) for rank in range(self._data_parallel.size)]
        lengths = [[self.division.sampled_lengths[index] for index in indices] for indices in shares]
        flat = pack(values_bt, self.lengths) if self.lengths else values_bt.new_zeros(0)
        parts = collectives.gather_flat(flat, [sum(tokens) for tokens in lengths], self._data_parallel.group)
        by_rank_bt = unpack(torch.cat(parts), [length for tokens in lengths for length in tokens])
        whole_bt = torch.empty_like(by_rank_bt)
        whole_bt[[index for indices in shares for index in indices]] = by_rank_bt
        return whole_bt

    def gather_rows(self, values_bk: Tensor) -> Tensor:
        """Values of the whole batch, [trajectories, k], from each rank's own [rows, k]. A collective."""
        shares = [self.division.indices(rank) for rank in range(self._data_parallel.size)]
        width = values_bk.shape[1]
        sizes = [len(indices) * width for indices in shares]
        parts = collectives.gather_flat(values_bk.flatten(), sizes, self._data_parallel.group)
        by_rank_bk = torch.cat(parts).view(-1, width)
        whole_bk = torch.empty_like(by_rank_bk)
        whole_bk[[index for indices in shares for index in indices]] = by_rank_bk
        return whole_bk

    def own_rows(self, whole_bt: Tensor) -> Tensor:
        """This rank's rows of values of the whole batch."""
        return whole_bt[self.division.indices(self._data_parallel.rank), : self.mask_bt.shape[1]]

    def pad(self, values_r: Tensor) -> Tensor:
        """Values of the sampled tokens of all of this rank's rows, [R] or [R, K], as [rows, longest] or [rows, longest,
        K]."""
        return unpack(values_r, self.lengths) if self.lengths else values_r.view(0, 0)

    def from_microbatches(self, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]) -> Tensor:
        """Values of each micro-batch, [R], as [rows, longest]; 0 in rows that are in no micro-batch."""
        out_bt = torch.zeros(self.mask_bt.shape, device=self.device)
        for batch, values_r in zip(microbatches, values, strict=True):
            if batch.rows:
                padded_bt = unpack(values_r, batch.sampled_lengths)
                out_bt[list(batch.rows), : padded_bt.shape[1]] = padded_bt
        return out_bt
