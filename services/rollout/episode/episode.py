"""An episode: what becomes of a prompt in one run. It yields one trajectory, or several if its history was rewritten.

A trajectory is one sequence of tokens: its prompt, and the turns of the policy with what was given between them. Each
turn keeps the very tokens that the engine sampled. An answer to a prompt is the episode of one trajectory of one turn.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from millrace.contracts.v1 import common_pb2
from millrace.data.chat import Rendered
from millrace.data.row import PromptRow
from millrace.drops import Drop
from millrace.wire.arrays import pack_experts, pack_logprobs, pack_tokens
from services.rollout.engine import Completion
from services.rollout.scoring.scored import Scored

NO_TOKENS = np.zeros(0, np.int32)


class EpisodeFailed(Exception):
    """An episode cannot be run, so that its group is dropped; `drop` says why."""

    def __init__(self, drop: Drop) -> None:
        super().__init__(str(drop))
        self.drop = drop


@dataclass(frozen=True)
class Prompt:
    """The prompt of a lease, ready for the engine."""

    row: PromptRow
    rendered: Rendered
    text: str
    """The prompt as the model sees it, with special tokens."""
    image_mark: str = ""
    """What stands in `text` for each image; empty without images."""

    def row_fields(self) -> dict[str, Any]:
        """The row as environments and agents get it."""
        row = self.row
        fields = {"index": row.index, "data_source": row.data_source, "prompt": row.prompt}
        return {**fields, "ground_truth": row.ground_truth, "extra_info": row.extra_info}


@dataclass(frozen=True)
class Turn:
    """One sample of the engine, and what was given before it."""

    completion: Completion
    given: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    """Tokens between the turn before and this one, int32: the result of a tool, or what a user said."""
    given_text: str = ""
    """The same as text, with special tokens."""
    reward: float = 0.0
    """What the turn itself earned."""
    temperature: float = 0.0
    """Temperature that it was sampled with; 0: that of the lease."""


@dataclass(frozen=True)
class Trajectory:
    """A sequence of tokens that begins with a prompt."""

    turns: tuple[Turn, ...]
    """The turns, in order; at least one."""
    prompt: NDArray[np.int32] | None = None
    """Tokens before the first turn, int32; None: those of the group's prompt."""
    prompt_text: str = ""
    """The same as text, with special tokens."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it, in JSON's types."""

    @property
    def is_plain(self) -> bool:
        """Whether it is one plain answer, with nothing more to report than an answer has."""
        first = self.turns[0]
        return len(self.turns) == 1 and not (len(first.given) or first.reward or first.temperature)

    def message(self) -> common_pb2.Trajectory:
        """The trajectory without its reward."""
        samples, plain, experts = [turn.completion for turn in self.turns], self.is_plain, self._experts()
        message = common_pb2.Trajectory(
            tokens=pack_tokens(
                np.concatenate([part for turn in self.turns for part in (turn.given, turn.completion.tokens)])
            ),
            logprobs=pack_logprobs(np.concatenate([completion.logprobs for completion in samples])),
            stop_reason=samples[-1].stop_reason.value,
            text=samples[0].text if plain else "",
            metadata=json.dumps(self.metadata) if self.metadata else "",
            prompt_text=self.prompt_text,
            experts=None if experts is None else pack_experts(experts),
        )
        if self.prompt is not None:
            message.prompt_tokens = pack_tokens(self.prompt)
        end = 0
        for turn in self.turns:
            start = end + len(turn.given)
            end = start + len(turn.completion.tokens)
            for span in turn.completion.versions:
                message.versions.add(version=span.version, start=start + span.start, end=start + span.end)
            if not plain:
                message.turns.add(
                    start=start,
                    end=end,
                    stop_reason=turn.completion.stop_reason.value,
                    reward=turn.reward,
                    temperature=turn.temperature,
                    given_text=turn.given_text,
                    text=turn.completion.text,
                )
        return message

    def _experts(self) -> NDArray[np.integer] | None:
        """The experts of prompt and response. A turn reports those of all tokens before it too. For each token, those
        count that were chosen first, when it was sampled."""
        of_turns = [turn.completion.experts for turn in self.turns]
        known = [experts for experts in of_turns if experts is not None]
        if not known or len(known) < len(of_turns):
            return None
        whole = known[0]
        for experts in known[1:]:
            whole = np.concatenate([whole, experts[len(whole) :]])
        return whole


@dataclass(frozen=True)
class Episode:
    """One run of a prompt."""

    trajectories: tuple[Trajectory, ...]
    """Its trajectories in the order in which they began; at least one."""
    scored: Scored | None = None
    """The score that the environment gave; None: the reward function scores `answer`."""
    account: common_pb2.EpisodeAccount | None = None
    """What happened in it; None if it had no environment."""

    @classmethod
    def of(cls, completion: Completion) -> Self:
        """The episode of one answer."""
        return cls((Trajectory((Turn(completion),)),))

    @property
    def samples(self) -> Iterator[Completion]:
        """What the engine sampled, in order."""
        return (turn.completion for trajectory in self.trajectories for turn in trajectory.turns)

    @property
    def answer(self) -> str:
        """The text of the last turn."""
        return self.trajectories[-1].turns[-1].completion.text

    def conversation(self, prompt_text: str) -> str:
        """All of its last trajectory as text, with special tokens. `prompt_text`: the group's prompt."""
        last = self.trajectories[-1]
        return (last.prompt_text or prompt_text) + "".join(
            turn.given_text + turn.completion.text for turn in last.turns
        )

    def without_experts(self) -> Self:
        """The episode without the experts that the engine's routers chose."""
        bare = (
            replace(
                one, turns=tuple(replace(turn, completion=replace(turn.completion, experts=None)) for turn in one.turns)
            )
            for one in self.trajectories
        )
        return replace(self, trajectories=tuple(bare))

    def messages(self, scored: Scored | None = None) -> list[common_pb2.Trajectory]:
        """The trajectories as messages, the last of them with the score, or why there is none, and the account."""
        messages = [trajectory.message() for trajectory in self.trajectories]
        if self.account is not None:
            messages[-1].account.CopyFrom(self.account)
        if scored is not None and scored.failure is not None:
            messages[-1].reward_failure = scored.failure
        elif scored is not None and scored.score is not None:
            messages[-1].reward = scored.score
            messages[-1].reward_details = json.dumps(scored.details) if scored.details else ""
        return messages
