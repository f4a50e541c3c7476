"""The environment of a job's episodes."""

from typing import Any

from pydantic import Field, model_validator

from millrace.validation import limits
from millrace.validation.model import StrictModel


class Environment(StrictModel):
    """Its processes have the limits of reward.memory_mb, reward.network and reward.isolation."""

    name: str
    """A class: `/path/to/file.py:MyEnvironment` or `module:MyEnvironment`."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"difficulty": 3}])
    """Keyword arguments of the class."""
    renderer: str = "default"
    """The chat format: a name of the library renderers, for example qwen3, or default, which takes the model's own chat
    template and extends what was sampled where the template allows it."""
    renderer_options: dict[str, Any] = Field(default_factory=dict, examples=[{"tool_parser": "qwen3"}])
    """Options of the renderer. default needs `tool_parser` where the environment has tools."""
    max_turns: int = Field(16, ge=1, le=10_000)
    """Turns of an episode, at most. It ends after the last one."""
    max_turn_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    """Longest turn, in tokens; null: as long as rollout.max_response_tokens leaves room."""
    episode_s: float = Field(600.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Seconds of an episode, with its generation. One that takes longer is run again once; then its group is
    dropped."""
    call_s: float = Field(30.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Seconds of one call of the class or of a tool. The policy is told that an `async` tool took longer; any other
    call that does is killed, and its episode with it."""
    processes: int = Field(8, ge=1, le=1024)
    """Processes of the environment in each replica. As many episodes run at once."""

    @model_validator(mode="before")
    @classmethod
    def by_name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given
