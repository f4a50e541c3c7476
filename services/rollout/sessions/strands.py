"""What grows in a session: conversations of messages, and sequences of tokens from clients that make the tokens
themselves. Each yields the trajectories of its turns.
"""

from collections.abc import Sequence
from typing import Protocol

from services.rollout.engine import Sample
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Trajectory
from services.rollout.episode.growing import Growing


class Strand(Protocol):
    """Trajectories, one after the other, of which the last may grow."""

    @property
    def prompt(self) -> list[int]:
        """The tokens of the next request to the engine."""

    @property
    def response_tokens(self) -> int:
        """Tokens of the trajectory that grows, after its first prompt."""

    def trajectories(self) -> tuple[Trajectory, ...]:
        """All that have turns."""


class TokenStrand:
    """A sequence that grows by the tokens of a client."""

    def __init__(self, chat: Chat, tokens: Sequence[int]) -> None:
        self._chat = chat
        self._growing = Growing.begun(tokens)

    @property
    def prompt(self) -> list[int]:
        """See `Strand`."""
        return self._growing.tokens

    @property
    def response_tokens(self) -> int:
        """See `Strand`."""
        return self._growing.response_tokens

    def added_by(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """What `tokens`, the next prompt, add to what was seen before; None where they do not begin with it."""
        return self._growing.added_by(tokens)

    def give(self, tokens: Sequence[int]) -> None:
        """Adds what stands before the next turn."""
        self._growing.give(tokens)

    def add(self, sample: Sample) -> None:
        """Adds a turn that was sampled after `prompt`."""
        self._growing.add(sample, self._chat.decode)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """See `Strand`."""
        return (self._growing.trajectory(self._chat.decode),) if self._growing.turns else ()
