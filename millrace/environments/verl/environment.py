"""The environment of verl's tools and interactions, and the two files that name them. They are read once in a process;
each episode has instances of its own.

`tools: [{class_name, config, tool_schema}]` are the tools that the policy may call, and
`interaction: [{name, class_name, config}]` what answers its turns.
"""

import functools
import importlib
import inspect
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from millrace.environments import Environment, Message, Row, Step, ToolResult
from millrace.environments.tools import BadArguments
from millrace.environments.verl.names import OpenAIFunctionToolSchema, offer
from millrace.errors import refused


class BadAnswer(ValueError):
    """A tool or an interaction returned something else than verl takes."""


@dataclass(frozen=True)
class VerlTool:
    """A tool as the policy sees it."""

    tool: Any
    """An object of the class that the file names."""

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        return str(self.tool.name)

    @property
    def spec(self) -> dict[str, Any]:
        """OpenAI's description of a function, which chat templates take."""
        schema = self.tool.tool_schema
        fields = schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else dict(schema)
        fields["function"].pop("strict", None)
        return dict(fields)

    def checked(self, given: Any) -> dict[str, Any]:
        """The arguments as they are: verl's tools check them. Raises BadArguments if they are no object."""
        if not isinstance(given, Mapping):
            raise BadArguments(f"the arguments of {self.name} are not an object with the parameters' names")
        return dict(given)

    def call(self, environment: "VerlEnvironment", arguments: Mapping[str, Any]) -> Any:
        """Executes the tool in the episode of `environment`."""
        return environment.execute(self.name, dict(arguments))


class VerlEnvironment(Environment):
    """An episode with verl's tools, and with the interaction that the row names, if there are any."""

    def __init__(self, tools: str | None = None, interaction: str | None = None, rewards: str = "function") -> None:
        self._tools = _tools(tools) if tools is not None else {}
        self._interactions = _interactions(interaction) if interaction is not None else {}
        self._counted = rewards == "tools"
        self._instances: dict[str, str] = {}
        self._row: Mapping[str, Any] = {}
        self._interaction: Any = None
        self._instance = ""
        self._messages: list[dict[str, Any]] = []

    @classmethod
    def tools_with(cls, options: Mapping[str, Any]) -> dict[str, VerlTool]:
        """The tools of an environment that is made with `options`, by name."""
        path = options.get("tools")
        return _tools(path) if path is not None else {}

    async def reset(self, row: Row) -> list[Message]:
        messages = list(await super().reset(row))
        self._row = row["extra_info"]
        self._messages = [dict(each) for each in messages]
        if self._interactions:
            kwargs = self._interaction_kwargs
            name = kwargs.get("name") or next(iter(self._interactions))
            if name not in self._interactions:
                raise BadAnswer(f"the row names the interaction {name}; there are {', '.join(self._interactions)}")
            self._interaction = self._interactions[name]
            instance = await _called(self._interaction.start_interaction, str(uuid.uuid4()), **kwargs)
            self._instance = str(instance)
        return messages

    async def step(self, message: Message) -> Step:
        if self._interaction is None:
            return [], None, True
        self._messages.append({"role": "assistant", "content": message["content"]})
        answer = await _called(
            self._interaction.generate_response, self._instance, self._messages, **self._interaction_kwargs
        )
        if not isinstance(answer, tuple) or len(answer) < 3:
            raise BadAnswer("generate_response returned something else than (over, text, reward, values)")
        over, text, reward, *_ = answer
        self._messages.append({"role": "user", "content": text})
        return [{"role": "user", "content": text}], reward if self._counted else None, bool(over)

    async def execute(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Executes a tool, whose instance is made when the episode calls it first."""
        tool, kwargs = self._tools[name].tool, self._tool_kwargs(name)
        if name not in self._instances:
            create = kwargs.get("create_kwargs") or {}
            made = await _called(tool.create, str(uuid.uuid4()), **{**create, "create_kwargs": create})
            self._instances[name] = str(made[0] if isinstance(made, tuple) else made)
        answer = await _called(tool.execute, self._instances[name], arguments, **(kwargs.get("execute_kwargs") or {}))
        if not isinstance(answer, tuple) or len(answer) < 2:
            raise BadAnswer("execute returned something else than (response, reward, metrics)")
        response, reward, *_ = answer
        text = response if isinstance(response, str) else getattr(response, "text", None)
        self._messages.append({"role": "tool", "content": text or ""})
        return ToolResult(text or "", reward if self._counted else None)

    async def score(self) -> Mapping[str, Any] | None:
        if not self._counted:
            return None
        earned = {}
        for name, instance in self._instances.items():
            kwargs = self._tool_kwargs(name).get("calc_reward_kwargs") or {}
            earned[name] = float(await _called(self._tools[name].tool.calc_reward, instance, **kwargs) or 0.0)
        return {"score": sum(earned.values()), **{f"{name}_reward": value for name, value in earned.items()}}

    async def close(self) -> None:
        for name, instance in self._instances.items():
            kwargs = self._tool_kwargs(name).get("release_kwargs") or {}
            await _called(self._tools[name].tool.release, instance, **kwargs)
        if self._interaction is not None:
            await _called(self._interaction.finalize_interaction, instance_id=self._instance)

    @property
    def _interaction_kwargs(self) -> dict[str, Any]:
        return dict(self._row.get("interaction_kwargs") or {})

    def _tool_kwargs(self, name: str) -> dict[str, Any]:
        return dict((self._row.get("tools_kwargs") or {}).get(name) or {})


async def _called(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a method returns, plain or async. It is given the named arguments that it takes."""
    parameters = inspect.signature(method).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        taken = {each.name for each in parameters}
        named = {name: value for name, value in named.items() if name in taken}
    result = method(*arguments, **named)
    return await result if inspect.isawaitable(result) else result


@functools.cache
def _tools(path: str) -> dict[str, VerlTool]:
    offer()
    made = []
    for named in read(path, "tools"):
        schema = named.rest.get("tool_schema")
        parsed = OpenAIFunctionToolSchema.model_validate(schema) if schema is not None else None
        made.append(VerlTool(imported(named, Path(path).parent)(config=dict(named.config), tool_schema=parsed)))
    return {each.name: each for each in made}


@functools.cache
def _interactions(path: str) -> dict[str, Any]:
    offer()
    made = {}
    for number, named in enumerate(read(path, "interaction")):
        name = str(named.rest.get("name") or f"interaction_{number}")
        made[name] = imported(named, Path(path).parent)(config={"name": name, **named.config})
    return made


FIELD = "rollout.environment.options"


@dataclass(frozen=True)
class Named:
    """A class that a file names, with what it is made with."""

    class_name: str
    """`package.module.Class`."""
    config: Mapping[str, Any]
    rest: Mapping[str, Any]
    """The other fields of the class: `tool_schema` of a tool, `name` of an interaction."""


def read(path: str, key: str) -> list[Named]:
    """The classes that a file names under `key`, `tools` or `interaction`. Raises InvalidJob."""
    field = f"{FIELD}.{key}"
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise refused(field, path, f"cannot be read: {error}", "name a YAML file of verl's.") from error
    entries = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries:
        raise refused(field, path, f"has no list `{key}`", f"name a file with `{key}:` as verl reads it.")
    return [_named(field, path, number, entry) for number, entry in enumerate(entries)]


def _named(field: str, path: str, number: int, entry: Any) -> Named:
    name = entry.get("class_name") if isinstance(entry, dict) else None
    config = (entry.get("config") or {}) if isinstance(entry, dict) else None
    if not isinstance(name, str) or "." not in name or not isinstance(config, dict):
        fix = "give each entry `class_name: package.module.Class` and `config`."
        raise refused(field, path, f"entry {number} names no class", fix)
    if config.get("type") == "mcp":
        fix = "name the server in rollout.environment.mcp instead."
        raise refused(field, path, f"entry {number} is a tool of an MCP server", fix)
    return Named(name, config, {key: each for key, each in entry.items() if key not in ("class_name", "config")})


def imported(named: Named, folder: Path) -> type:
    """The class. It is looked for on Python's path and in `folder`. Raises ImportError, AttributeError, and what the
    user's module raises."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module, _, name = named.class_name.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
