"""A turn, before it is written in the words of a client: what a request asks for, what was sampled, and who says it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine import Completion
from services.rollout.episode.chat import Message


@dataclass(frozen=True)
class TurnRequest:
    """What one request asks of the policy, in whichever dialect it came."""

    messages: Sequence[Message] = ()
    """The whole history, the content of each message as text."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the agent offers, in the form in which OpenAI describes functions."""
    max_tokens: int | None = None
    """Longest turn; None: as long as there is room."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn, besides those of the job."""
    calls: bool = True
    """Whether calls of tools are returned as such, or as text."""


@dataclass(frozen=True)
class SampledTurn:
    """A turn that was sampled for a request."""

    number: int
    """The number of the turn in its session, from 0."""
    message: Message
    """The turn in the form in which the client gets it."""
    completion: Completion
    prompt_tokens: int
    engine_s: float
    """Seconds that the engine took for it."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls of tools that can be read."""
        return [call for call in self.message.get("tool_calls", ()) if "function" in call]

    @property
    def content(self) -> str:
        """The text, with the calls that cannot be read."""
        unread = [call["raw"] for call in self.message.get("tool_calls", ()) if "function" not in call]
        return "".join([self.message.get("content") or "", *unread])

    @property
    def reasoning(self) -> str:
        """What the policy thought before the text."""
        return str(self.message.get("reasoning_content") or "")


@dataclass(frozen=True)
class Speaker:
    """Who says the turns: the policy in a session, or the model of a pool."""

    id: str
    """The ids of answers begin with it."""
    model: str
    """Name of the model, for answers to requests that name none."""
    decode: Callable[[Sequence[int]], str]
    """The text of tokens, with special ones."""
    temperature: float = 1.0
    top_p: float = 1.0
