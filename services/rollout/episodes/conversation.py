"""The conversation of an episode. Every prompt of a trajectory begins with the tokens that the engine saw and sampled
before: no turn is made into tokens twice. Where the chat format leaves no such prompt, the episode forks: what follows
is another trajectory, with the rewritten history as its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.rollout.engine import Sample, StopReason
from services.rollout.episodes.chat import Chat, Message
from services.rollout.work.episode import Trajectory, Turn


@dataclass
class _Growing:
    """The trajectory that the next turn extends."""

    tokens: list[int]
    """Prompt, turns and what was given, up to the next turn."""
    prompt: int
    """Number of tokens of the prompt."""
    turn: int
    """Where the last turn begins."""
    turns: list[Turn] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """What was given since the last turn: the last of `tokens`."""


class Conversation:
    """A conversation in progress. Its methods change it, and do nothing else."""

    def __init__(self, chat: Chat, messages: Sequence[Message]) -> None:
        """Begins with `messages`. Raises BadRow."""
        self._chat = chat
        self._history = list(messages)
        self._done: list[Trajectory] = []
        self._growing = self._begun()

    @property
    def prompt(self) -> list[int]:
        """The tokens of the next request to the engine."""
        return self._growing.tokens

    @property
    def response_tokens(self) -> int:
        """Tokens of this trajectory after its first prompt."""
        return len(self._growing.tokens) - self._growing.prompt

    @property
    def forks(self) -> int:
        """Number of trajectories that ended because the history was rewritten."""
        return len(self._done)

    def add(self, sample: Sample) -> Message:
        """Adds a turn that was sampled after `prompt`. Returns it as the environment gets it."""
        now, ended = self._growing, sample.stop_reason is StopReason.END_OF_TURN
        sampled = sample.tokens.tolist()
        message, remembered = self._chat.read(now.tokens, sampled, ended=ended)
        text = self._chat.decode(now.given) if now.given else ""
        now.turns.append(Turn(sample, np.array(now.given, np.int32), text))
        now.turn, now.given, now.tokens = len(now.tokens), [], [*now.tokens, *sampled]
        self._history.append(remembered)
        return message | {"stop_reason": sample.stop_reason.name.lower()}

    def reward(self, value: float) -> None:
        """The last turn has earned `value`."""
        turns = self._growing.turns
        turns[-1] = replace(turns[-1], reward=turns[-1].reward + value)

    def tell(self, messages: Sequence[Message]) -> None:
        """Adds what follows the last turn. Raises BadRow."""
        now = self._growing
        given = self._chat.between(now.tokens, now.turn, self._history, messages)
        self._history += messages
        if given is None:
            self._done.append(self._trajectory())
            self._growing = self._begun()
        else:
            now.given, now.tokens = given, [*now.tokens, *given]

    def trajectories(self) -> tuple[Trajectory, ...]:
        """All trajectories that have turns, in order. What was told after the last turn is in none."""
        return (*self._done, self._trajectory()) if self._growing.turns else tuple(self._done)

    def _begun(self) -> _Growing:
        prompt = self._chat.render(self._history)
        return _Growing(prompt, prompt=len(prompt), turn=len(prompt))

    def _trajectory(self) -> Trajectory:
        prompt = self._growing.tokens[: self._growing.prompt]
        return Trajectory(tuple(self._growing.turns), np.array(prompt, np.int32), self._chat.decode(prompt))
