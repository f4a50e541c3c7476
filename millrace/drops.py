"""Why prompts are given up: the reasons that the ledger counts. One of them is that all rewards of a group are equal,
so that it is not worth a step (DAPO, arXiv 2503.14476)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class DropReason(StrEnum):
    """DropReason of proto/millrace/v1/common.proto. The ledger, events, Prometheus and REST use these values."""

    UNSPECIFIED = "unspecified"
    """The reason is of another release, which has other ones."""
    BAD_ROW = "bad_row"
    """The row of the data cannot be read, or cannot be made into a prompt."""
    BAD_PROMPT = "bad_prompt"
    """The prompt does not go through the model's tokenizer or chat template."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt has more than `data.max_prompt_tokens` tokens, and the job drops such prompts."""
    BAD_LOGPROBS = "bad_logprobs"
    """The engine answered a log-probability that is NaN or infinite."""
    REWARD_FAILED = "reward_failed"
    """The reward function failed, hung or crashed on one of the answers, or returned a value that cannot be used."""
    INCOMPLETE_GROUP = "incomplete_group"
    """The group has fewer episodes than `min_samples`, more than `samples_per_prompt`, or lacks the greedy reward."""
    MALFORMED_GROUP = "malformed_group"
    """The parts of a trajectory contradict each other or the job: tokens, turns, log-probabilities, version spans,
    temperature, length."""
    GROUP_TOO_LARGE = "group_too_large"
    """The group is larger than one message to the coordinator may be."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The environment failed, hung, crashed or took too long in an episode, twice."""
    REPLICA_FAILED = "replica_failed"
    """The replica met a bug while it worked on this prompt."""
    KILLED_REPLICAS = "killed_replicas"
    """Replica after replica died while it worked on this prompt."""
    NO_SIGNAL = "no_signal"
    """All rewards of the group are equal, so that every advantage is 0, and the job drops such groups."""
    TOO_STALE = "too_stale"
    """The group is staler than `schedule.max_staleness`, and the job drops such groups."""
    JOB_SUCCEEDED = "job_succeeded"
    """The job had trained all of its steps while the prompt was still in flight."""
    JOB_FAILED = "job_failed"
    """The job failed while the prompt was still in flight."""
    JOB_CANCELLED = "job_cancelled"
    """The job was cancelled while the prompt was still in flight."""
    JOB_PREEMPTED = "job_preempted"
    """The job gave way to another one while the prompt was still in flight. It is issued again when the job goes on."""


@dataclass(frozen=True)
class Drop:
    """A prompt is given up: the reason for the ledger, and the detail for people."""

    reason: DropReason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


TOLERANCE = 1e-9
"""Difference of rewards, absolute and relative to them, up to which they are equal. The same rewards that are summed in
another order, or in other parts, differ by rounding: in float64 by far less than this."""


def equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards from `lowest` to `highest` are all equal: of numbers, or of each element of two tensors. Nothing
    else decides this."""
    return highest - lowest <= TOLERANCE * (1 + abs(lowest) + abs(highest))


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all equal."""
    return bool(equal(min(rewards), max(rewards)))


def without_signal(rewards: Sequence[float], *others: Sequence[float]) -> Drop | None:
    """Dynamic sampling: a group whose rewards are all equal is dropped, as every advantage in it is 0. None if the
    group is kept. `others`: further rewards of each sample, where advantages compare several one by one."""
    if not rewards:
        return Drop(DropReason.NO_SIGNAL, "no sample was scored")
    if not all(map(all_equal, (rewards, *others))):
        return None
    return Drop(DropReason.NO_SIGNAL, f"all {len(rewards)} rewards are {max(rewards):g}")
