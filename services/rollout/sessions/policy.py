"""What answers in a session: the engine, the chat format with the agent's tools, and the limits of the job."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from millrace.errors import InvalidJob, wrong_value
from millrace.spec import JobSpec
from millrace.spec.environment import Agent, Environment
from services.rollout.dialects.requests import Refusals, Refused
from services.rollout.engine import Engine, Sampling
from services.rollout.episode.chat import Chat
from services.rollout.episode.conversation import Strand
from services.rollout.episode.slots import EpisodeSlot

MOST_CHATS = 256
"""Sets of tools of which the chat format is kept."""
MARGIN = 256 << 10
"""Bytes of text that a request may have beyond those that its tokens can stand for: what a chat template leaves out."""
ESCAPED = 3
"""Bytes of JSON for a byte of text, at most: a character of two bytes is written as six."""
LARGE = 256 << 10
"""Characters and tokens from which the work on a request is large."""
MOST_LARGE = 2
"""Requests of a job on which large work is done at the same time."""


class Chats:
    """The job's chat format, with the tools that a request names."""

    def __init__(self, chat: Chat) -> None:
        self.without_tools = chat
        self.large = asyncio.Semaphore(MOST_LARGE)
        """Taken for large work in a thread."""
        self._of: OrderedDict[str, Chat] = OrderedDict()

    def of(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Chat, str]:
        """The format with these tools, and the tools as text. Raises Refused if it cannot read calls of tools."""
        key = json.dumps(tools, sort_keys=True) if tools else ""
        if not key:
            return self.without_tools, key
        if key not in self._of:
            try:
                self._of[key] = self.without_tools.with_tools(tools)
            except InvalidJob as error:
                raise Refused(Refusals.INVALID, error.what, error.fix, "tools") from error
            if len(self._of) > MOST_CHATS:
                self._of.popitem(last=False)
        self._of.move_to_end(key)
        return self._of[key], key

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return self.without_tools.longest_token

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises Refused for tokens that the model does not have: an engine may end when it gets one."""
        most = self.without_tools.vocabulary
        if (wrong := next((token for token in tokens if not 0 <= token < most), None)) is not None:
            reason = f"the model's tokens are 0 to {most - 1}"
            raise Refused.of(wrong_value("token_ids", wrong, reason, "use the tokenizer of the job's model."))


@dataclass(frozen=True)
class Policy:
    """What answers in the sessions of one episode."""

    engine: Engine
    chats: Chats
    sampling: Sampling
    """The lease's. Its temperature, top-p and top-k hold for every turn, whatever an agent asks for."""
    slot: EpisodeSlot
    """The episode's slot of the engine, which each turn takes while it is generated."""
    longest: int
    """Tokens of a trajectory, at most."""
    max_turns: int
    max_turn_tokens: int | None
    model: str
    """Name of the model, as clients see it."""

    @classmethod
    def of_job(
        cls,
        spec: JobSpec,
        limits: Agent | Environment,
        chats: Chats,
        engine: Engine,
        sampling: Sampling,
        slot: EpisodeSlot,
    ) -> Self:
        """The policy of a lease with `sampling`, within the job's `limits` of turns."""
        return cls(
            engine=engine,
            chats=chats,
            sampling=sampling,
            slot=slot,
            longest=spec.data.max_prompt_tokens + sampling.max_response_tokens,
            max_turns=limits.max_turns,
            max_turn_tokens=limits.max_turn_tokens,
            model=spec.model.path,
        )

    def largest_text(self, sampled: int) -> int:
        """Bytes of text in a request of a session that has `sampled` tokens so far: more are more tokens than a
        trajectory has. What was sampled counts once more, as a chat template may leave out what the policy thought."""
        return MARGIN + (self.longest + sampled) * self.chats.longest_token

    def room(self, strand: Strand) -> int:
        """Tokens that the next turn may have."""
        room = min(self.sampling.max_response_tokens - strand.response_tokens, self.longest - len(strand.prompt))
        return min(room, self.max_turn_tokens or room)

    def cut_by_turn(self, room: int) -> bool:
        """Whether a turn of `room` tokens is as long as one turn may be, and not as long as the trajectory allows."""
        return room == self.max_turn_tokens

    def asked(self, most: int, stop: Sequence[str]) -> Sampling:
        """The request to the engine for a turn of at most `most` tokens."""
        return replace(self.sampling, max_response_tokens=most, stop=(*self.sampling.stop, *stop))
