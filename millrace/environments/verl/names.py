"""What tools and interactions import of verl, for hosts without it: the base classes, and the types of their schemas.

`offer()` makes these known under verl's names if verl is not installed.
"""

import importlib.util
import sys
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Function = TypeVar("Function", bound=Callable[..., Any])


class _Open(BaseModel):
    """Keeps what it does not know."""

    model_config = ConfigDict(extra="allow")


class ToolResponse(_Open):
    """What a tool answers."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class OpenAIFunctionPropertySchema(_Open):
    """A parameter of a tool."""

    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The parameters of a tool, as JSON schema."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Open):
    """A tool, as OpenAI describes functions."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A tool in a list of tools."""

    type: str = "function"
    function: OpenAIFunctionSchema


class BaseTool:
    """Base class of tools. An instance of a tool belongs to one episode."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The description of the tool, if the file has none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Makes an instance. Returns its id."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the tool: what it answers, what the turn earns, metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the episode earns with the tool."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


class BaseInteraction:
    """Base class of interactions. An instance belongs to one episode."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Makes an instance. Returns its id."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """What answers a turn: whether the episode is over, the text, what the turn earns, further values."""
        raise NotImplementedError

    async def calculate_score(self) -> float:
        """What the last turn earned."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """Ends an instance."""


def rollout_trace_op(function: Function) -> Function:
    """verl traces what it decorates; here it is left as it is."""
    return function


MODULES: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.schemas": {
        each.__name__: each
        for each in (
            ToolResponse,
            OpenAIFunctionPropertySchema,
            OpenAIFunctionParametersSchema,
            OpenAIFunctionSchema,
            OpenAIFunctionToolSchema,
        )
    },
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
}
"""The modules that are offered, with their names."""


def offer() -> None:
    """Makes the modules known, unless verl is installed."""
    if "verl" in sys.modules:
        return
    found = importlib.util.find_spec("verl")
    if found is not None and found.origin is not None:  # without an origin it is a folder of that name
        return
    for path, names in MODULES.items():
        module = ModuleType(path)
        module.__dict__.update(names, __path__=[])
        sys.modules[path] = module
        above, _, name = path.rpartition(".")
        if above:
            setattr(sys.modules[above], name, module)
