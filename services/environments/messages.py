"""What a replica asks a host of environments, and what the host answers."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class EpisodeRequest:
    """An episode that a replica asks for."""

    task: Mapping[str, Any]
    """The task's data, as `tasks` wrote it."""
    url: str
    """The address of the session at the replica."""
    key: str
    """The key of the session."""
    model: str
    """Folder or name of the model, whose tokenizer the host loads."""
    renderer: Mapping[str, Any]
    """`name` of the chat format in the library renderers, and its options."""
    seconds: float
    """How long the episode may take."""
    temperature: float

    @classmethod
    def read(cls, body: Any) -> Self:
        """Raises ValueError for a body that is no such request."""
        if not isinstance(body, dict) or set(body) != set(cls.__dataclass_fields__):
            raise ValueError(f"an episode is an object with {', '.join(cls.__dataclass_fields__)}")
        return cls(**body)


@dataclass(frozen=True)
class Branch:
    """A sequence of tokens of the episode that is to be trained."""

    tokens: list[int]
    sampled: list[tuple[int, int]]
    """Spans of `tokens` that the policy sampled, [start, end)."""


@dataclass(frozen=True)
class PlayedEpisode:
    """What became of an episode."""

    reward: float | None = None
    """None: it was not scored."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty if it did not."""
    branches: list[Branch] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """The trace in JSON's types."""
        return asdict(self)


class Plays(Protocol):
    """An environment that plays episodes."""

    @property
    def name(self) -> str:
        """The environment's name, which is the `data_source` of its rows."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Holds what its episodes share."""

    async def run(self, asked: EpisodeRequest) -> PlayedEpisode:
        """One episode. An error in it is part of the result, not raised."""
