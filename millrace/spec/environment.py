"""What plays the episodes of a job: an environment of several turns, or an agent over HTTP."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from millrace.errors import wrong_value
from millrace.validation import limits
from millrace.validation.fields import StrictModel
from millrace.validation.mistakes import InvalidValue


class McpServer(StrictModel):
    """A server of the Model Context Protocol, whose tools the policy may call. Either `command` or `url`."""

    command: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=256, examples=[["python3", "/data/tools/search.py"]]
    )
    """Program and arguments of a server that speaks over its standard input and output. It runs beside the engine, with
    the limits of reward.memory_mb, reward.network and reward.isolation."""
    url: str | None = Field(None, pattern="^https?://", max_length=2048, examples=["http://tools:8000/mcp"])
    """Address of a server that speaks streamable HTTP."""
    token_env: str | None = Field(None, pattern="^MCP_[A-Z0-9_]{1,60}$", examples=["MCP_TOKEN"])
    """Environment variable of the replicas that holds the bearer token for `url`. Its name begins with MCP_."""
    scope: Literal["replica", "episode"] = "replica"
    """replica: all episodes of a replica share one connection. episode: each has a connection of its own, and with
    `command` a process of its own, so that `episodes_per_process` is 1 unless it is given; a lost connection then ends
    the episode."""
    tools: list[str] | None = Field(None, min_length=1, max_length=1024, examples=[["search", "open_page"]])
    """Names of the tools that are offered; null: all of the server."""

    @model_validator(mode="after")
    def one_place(self) -> "McpServer":
        if bool(self.command) == (self.url is not None):
            fix = "give one of them: `command` for a program, `url` for a server that runs already."
            raise InvalidValue(wrong_value("url", self.url, "command and url are both given or both missing", fix))
        return self


class Environment(StrictModel):
    """What answers the policy in episodes of several turns. The processes of an environment have the limits of
    reward.memory_mb, reward.network and reward.isolation."""

    name: str = "tools"
    """A class, `/path/to/file.py:MyEnvironment` or `module:MyEnvironment`, or one that is built in:
    docs/environments.md. tools: nothing beside the tools of `mcp`."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"difficulty": 3}])
    """Keyword arguments of the class, or the options of the built-in environment."""
    mcp: list[McpServer] = Field(default_factory=list, max_length=64, examples=[[{"url": "http://tools:8000/mcp"}]])
    """Servers whose tools the policy may call, beside those of the environment."""
    renderer: str = "default"
    """The chat format: a name of the library renderers, for example qwen3, or default, which takes the model's own chat
    template and extends what was sampled if the template allows it."""
    renderer_options: dict[str, Any] = Field(default_factory=dict, examples=[{"tool_parser": "qwen3"}])
    """Options of the renderer. default needs `tool_parser` if the environment has tools."""
    max_turns: int = Field(16, ge=1, le=10_000)
    """Turns of an episode, at most. It ends after the last one."""
    max_turn_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    """Longest turn, in tokens; null: as long as rollout.max_response_tokens leaves room."""
    episode_s: float = Field(600.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Seconds of an episode, with its generation. One that takes longer is run again once; then its group is
    dropped."""
    call_s: float = Field(30.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Seconds of one call of the class or of a tool. An `async` call that takes longer is cancelled: a tool's call
    answers the policy with an error, and any other call fails the episode. A plain call is killed with its process."""
    processes: int = Field(8, ge=1, le=1024)
    """Processes of a class in each replica; sessions of a replica with an OpenEnv server."""
    episodes_per_process: int | None = Field(None, ge=1, le=1024, examples=[32])
    """Episodes that run in each process at the same time; of other environments but OpenEnv `processes` times as many
    run at once. A plain call, one that is not `async`, holds up the others of its process, and one that hangs or
    crashes ends them: they are run again. 1 keeps episodes apart. null: 32, or 1 if a server of `mcp` has `command`
    and the scope episode."""

    @property
    def episodes_of_process(self) -> int:
        """Episodes that run in each process at the same time."""
        if self.episodes_per_process is not None:
            return self.episodes_per_process
        starts_programs = any(server.command and server.scope == "episode" for server in self.mcp)
        return 1 if starts_programs else 32

    @property
    def episodes_at_once(self) -> int:
        """Episodes that run at the same time in each replica."""
        return self.processes * self.episodes_of_process

    @model_validator(mode="before")
    @classmethod
    def by_name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


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
    its files and network; replicas take that with MILLRACE_UNSANDBOXED_AGENTS=1 in their environment only."""
    commands: int = Field(8, ge=1, le=1024)
    """Commands that run at once in each replica."""
    sessions: int = Field(1024, ge=1, le=65_536)
    """Sessions that agents elsewhere may have open at once in each replica, with those that wait to be claimed."""
    renderer: str = "default"
    """The chat format: a name of the library renderers, for example qwen3, or default, which takes the model's own chat
    template and extends what was sampled if the template allows it."""
    renderer_options: dict[str, Any] = Field(default_factory=dict, examples=[{"tool_parser": "qwen3"}])
    """Options of the renderer. default needs `tool_parser` if the agent has tools."""
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
