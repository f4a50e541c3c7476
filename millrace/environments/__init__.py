"""Environments: what the policy talks to in an episode of several turns, written as a Python class. See
docs/environments.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from millrace.environments.tools import tool

Message = Mapping[str, Any]
"""`role` and `content`. A message of the policy also has `stop_reason`, and `reasoning_content` and `tool_calls` (as
OpenAI's chat completions have them) if the renderer found such."""
Step = tuple[Sequence[Message] | str, float | None, bool]
"""What follows a turn: messages to the policy (text is one message of the user), the reward of the turn or None, and
whether the episode is over."""
__all__ = ["Environment", "Message", "Row", "Step", "ToolResult", "tool"]


@dataclass(frozen=True)
class ToolResult:
    """What a tool may return if it says more than its content."""

    content: Any
    """Text, or what can be written as JSON."""
    reward: float | None = None
    """What the turn earns with the call."""
    done: bool = False
    """Whether the episode is over."""


class Row(TypedDict):
    """The row of the data that an episode runs with."""

    index: int
    data_source: str
    prompt: Any
    """Messages, or plain text."""
    ground_truth: Any
    extra_info: dict[str, Any]


class Environment:
    """Base class of environments. It is made for each episode, with the options of the job as keyword arguments.

    Methods that are marked with `millrace.environments.tool` can be called by the policy. A turn that calls tools is
    answered with their results; `step` is called for every other turn.
    """

    async def reset(self, row: Row) -> Sequence[Message]:
        """The first messages. Those of the row, unless a subclass says otherwise."""
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def step(self, message: Message) -> Step:
        """What follows `message`, a turn of the policy that calls no tool."""
        raise NotImplementedError("write `async def step(self, message)`, or name an environment that has it")

    async def score(self) -> float | Mapping[str, Any] | None:
        """Reward at the end of the episode, however it ended: a number, or a mapping with `score` and further values.
        It is added to the rewards of the turns. None: 0 if `step` gave a reward, and otherwise the reward function
        scores the last turn."""
        return None

    async def close(self) -> None:
        """Called when the episode is over, unless its process was killed."""
