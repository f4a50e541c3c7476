"""Tools: typed methods of an environment that the policy can call by name with JSON arguments."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__millrace_tool__"
ARGUMENTS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


class BadTool(TypeError):
    """A method cannot be a tool."""


class BadArguments(ValueError):
    """The policy called a tool with arguments that do not fit. The policy gets the message."""


def tool(function: Function) -> Function:
    """Marks a method of an environment, plain or `async`, as a tool. Its parameters need type annotations. The first
    part of its docstring is the description; lines `name: text` under `Args:` describe the parameters."""
    setattr(function, MARK, True)
    return function


@dataclass(frozen=True)
class Tool:
    """A tool as the policy sees it, and how its arguments are checked."""

    name: str
    description: str
    arguments: type[BaseModel]

    @property
    def spec(self) -> dict[str, Any]:
        """OpenAI's description of a function, which chat templates take."""
        schema = _without_titles(self.arguments.model_json_schema())
        schema.pop("description", None)
        schema.pop("additionalProperties", None)
        described = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": described}

    def call(self, environment: Any, arguments: Mapping[str, Any]) -> Any:
        """What the method of `environment` returns, to be awaited if it is awaitable."""
        return getattr(environment, self.name)(**arguments)

    def checked(self, given: Any) -> dict[str, Any]:
        """The arguments as the annotations of the method say. Raises BadArguments."""
        if not isinstance(given, Mapping):
            raise BadArguments(f"the arguments of {self.name} are not an object with the parameters' names")
        try:
            model = self.arguments.model_validate(dict(given))
        except ValidationError as error:
            errors = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
            raise BadArguments(f"wrong arguments for {self.name}: {'; '.join(errors)}") from error
        return {name: getattr(model, name) for name in type(model).model_fields if name in model.model_fields_set}


class Offered(Protocol):
    """A tool that an environment offers. `Tool` is one."""

    @property
    def spec(self) -> dict[str, Any]:
        """OpenAI's description of a function, which chat templates take."""

    def checked(self, given: Any) -> dict[str, Any]:
        """The arguments that the policy gave. Raises BadArguments."""

    def call(self, environment: Any, arguments: Mapping[str, Any]) -> Any:
        """What the tool returns, to be awaited if it is awaitable."""


def tools_of(environment: type, options: Mapping[str, Any]) -> Mapping[str, Offered]:
    """The tools of a class that is made with `options`, by name: what its `tools_with` says, otherwise its methods in
    the order in which it defines them. Raises BadTool."""
    if (given := getattr(environment, "tools_with", None)) is not None:
        offered: Mapping[str, Offered] = given(options)
        return offered
    methods = {name: method for base in reversed(environment.__mro__) for name, method in vars(base).items()}
    return {name: _tool(name, method) for name, method in methods.items() if getattr(method, MARK, False)}


def _tool(name: str, method: Callable[..., Any]) -> Tool:
    description, described = _documented(inspect.getdoc(method) or "")
    try:
        hints = typing.get_type_hints(method, include_extras=True)
        _, *parameters = inspect.signature(method).parameters.values()
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise BadTool(f"the tool {name} has the parameter {parameter}, which has no name of its own")
            if parameter.name not in hints:
                raise BadTool(f"the parameter {parameter.name} of the tool {name} has no type annotation")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], Field(default, description=described.get(parameter.name)))
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        arguments.model_json_schema()
    except (NameError, PydanticUserError) as error:
        raise BadTool(f"the parameters of the tool {name} have no JSON schema: {str(error).splitlines()[0]}") from error
    return Tool(name, description, arguments)


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and those of the parameters."""
    description, *rest = ARGUMENTS.split(text, maxsplit=1)
    found = (ARGUMENT.match(line) for line in (rest[0].splitlines() if rest else ()))
    return " ".join(description.split()), {match[1]: match[2].strip() for match in found if match}


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """The schema without the titles that pydantic adds. `names`: the keys of this level are parameters' names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = ((key, value) for key, value in schema.items() if names or key != "title")
    return {key: _without_titles(value, names=key in ("properties", "$defs") and not names) for key, value in kept}
