"""The agent of a job's episodes: a program that asks the policy over HTTP."""

from typing import Any

from pydantic import Field, model_validator

from millrace.validation import limits
from millrace.validation.model import StrictModel


class Agent(StrictModel):
    """Agents run elsewhere, and claim the episodes."""

    external: bool = False
    """Whether agents run elsewhere and claim episodes with `POST /sessions`."""
    renderer: str = "default"
    """The chat format: a name of the library renderers, for example qwen3, or default, which takes the model's own chat
    template and extends what was sampled where the template allows it."""
    renderer_options: dict[str, Any] = Field(default_factory=dict, examples=[{"tool_parser": "qwen3"}])
    """Options of the renderer. default needs `tool_parser` where the agent has tools."""
    max_turns: int = Field(64, ge=1, le=10_000)
    """Turns of an episode, at most. Further requests are refused."""
    max_turn_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    """Longest turn, in tokens; null: as long as rollout.max_response_tokens leaves room."""
    episode_s: float = Field(600.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Seconds of an episode, from its claim. One that takes longer is run again once; then
    its group is dropped."""

    @model_validator(mode="before")
    @classmethod
    def in_one_word(cls, given: Any) -> Any:
        return {"external": True} if given == "external" else given
