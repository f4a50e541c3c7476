"""A trajectory in growth, as tokens: every prompt begins with what the engine saw and sampled before. Clients that make
the tokens themselves extend it directly; `conversation.py` extends it by messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from services.rollout.engine import Completion
from services.rollout.episode.admission import Seen
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Trajectory, Turn

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, with special ones."""


@dataclass
class Growing:
    """The trajectory that the next turn extends."""

    tokens: list[int]
    """Prompt, turns and what was given, up to the next turn."""
    prompt: int
    """Number of tokens of the prompt."""
    turn: int
    """The index of the last turn's first token."""
    turns: list[Turn] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """What was given since the last turn: the last of `tokens`."""

    @classmethod
    def begun(cls, prompt: Sequence[int]) -> Self:
        """The trajectory that begins with `prompt`."""
        return cls(list(prompt), prompt=len(prompt), turn=len(prompt))

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt, sampled and given."""
        return len(self.tokens) - self.prompt

    @property
    def seen(self) -> Seen | None:
        """What the engine has seen of `tokens`; None before the first turn, and if it keeps no prefixes."""
        cached = self.turns[-1].completion.cached if self.turns else None
        # The last token of a turn was sampled, and nothing computed with it.
        return None if cached is None else Seen(len(self.tokens) - len(self.given) - 1, cached)

    def added_by(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """The tokens that `prompt` has after those of the trajectory; None if it does not begin with them."""
        known = len(self.tokens)
        return prompt[known:] if list(prompt[:known]) == self.tokens else None

    def give(self, tokens: Sequence[int]) -> None:
        """Adds what stands before the next turn."""
        self.given, self.tokens = [*self.given, *tokens], [*self.tokens, *tokens]

    def add(self, completion: Completion, decode: Decode) -> None:
        """Adds a turn that was sampled after `tokens`."""
        text = decode(self.given) if self.given else ""
        self.turns.append(Turn(completion, np.array(self.given, np.int32), text))
        self.turn, self.given, self.tokens = len(self.tokens), [], [*self.tokens, *completion.tokens.tolist()]

    def reward(self, value: float) -> None:
        """The last turn has earned `value`."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + value)

    def trajectory(self, decode: Decode) -> Trajectory:
        """What has grown. What was given after the last turn is not in it."""
        prompt = self.tokens[: self.prompt]
        return Trajectory(tuple(self.turns), np.array(prompt, np.int32), decode(prompt))


class Strand:
    """Trajectories, one after the other, of which the last may grow."""

    def __init__(self, chat: Chat, prompt: Sequence[int]) -> None:
        """Begins with the tokens `prompt`."""
        self._chat = chat
        self._growing = Growing.begun(prompt)

    @property
    def prompt(self) -> list[int]:
        """The tokens of the next request to the engine."""
        return self._growing.tokens

    @property
    def seen(self) -> Seen | None:
        """What the engine has seen of `prompt` with the turn before; None if there was none, or it does not tell."""
        return self._growing.seen

    @property
    def response_tokens(self) -> int:
        """Tokens of the trajectory that grows, after its first prompt."""
        return self._growing.response_tokens

    def trajectories(self) -> tuple[Trajectory, ...]:
        """All that have turns, in order. What was added after the last turn is in none."""
        return (self._growing.trajectory(self._chat.decode),) if self._growing.turns else ()


class TokenStrand(Strand):
    """A sequence that grows by the tokens of a client."""

    def added_by(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """What `tokens`, the next prompt, add to what was seen before; None if they do not begin with it."""
        return self._growing.added_by(tokens)

    def give(self, tokens: Sequence[int]) -> None:
        """Adds what stands before the next turn."""
        self._growing.give(tokens)

    def add(self, completion: Completion) -> None:
        """Adds a turn that was sampled after `prompt`."""
        self._growing.add(completion, self._chat.decode)
