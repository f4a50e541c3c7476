"""The agent of a job's episodes: a program that asks the policy over HTTP."""

from typing import Any

from pydantic import Field, model_validator

from millrace.validation import limits
from millrace.validation.model import StrictModel


class Agent(StrictModel):
    """Either `command` or `external`. A command has the limits of reward.memory_mb, reward.network and
    reward.isolation."""

    command: list[str] = Field(default_factory=list, max_length=256, examples=[["python", "/data/agents/agent.py"]])
    """The program with its arguments, which the replica runs once for each episode. Exit status 0 ends the episode."""
    external: bool = False
    """Whether agents run elsewhere and claim episodes with `POST /sessions`."""
    sandbox: bool = True
    """Whether the command runs in a sandbox, which sees the files that its arguments name with their folders, and of
    the network only its session, or everything with reward.network. If not, it runs as the replica does, with all of
    its files and network."""
    commands: int = Field(8, ge=1, le=1024)
    """Commands that run at once in each replica."""
    sessions: int = Field(1024, ge=1, le=65_536)
    """Sessions that agents elsewhere may have open at once in each replica, with those that wait to be claimed."""
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
    """Seconds of an episode, from its claim or the start of the command. One that takes longer is run again once; then
    its group is dropped."""

    @model_validator(mode="before")
    @classmethod
    def in_one_word(cls, given: Any) -> Any:
        return {"external": True} if given == "external" else given
