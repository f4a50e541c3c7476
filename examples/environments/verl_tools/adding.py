"""A tool and an interaction as verl has them: the files beside this one name them."""

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Adder(BaseTool):
    """Adds numbers to a sum. An episode earns 1 if its sum is the row's."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._sums: dict[str, float] = {}
        self._wanted: dict[str, float] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._sums[instance_id] = 0.0
        self._wanted[instance_id] = float(kwargs.get("create_kwargs", {}).get("ground_truth", "nan"))
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self._sums[instance_id] += float(parameters["number"])
        return ToolResponse(text=f"The sum is {self._sums[instance_id]:g}."), -self.config["call_costs"], {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self._sums[instance_id] == self._wanted[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._sums[instance_id], self._wanted[instance_id]


class Teacher(BaseInteraction):
    """Says whether the answer is right, at most `tries` times."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._tries: dict[str, int] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        self._tries[instance_id] = 0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        self._tries[instance_id] += 1
        if messages[-1]["content"].strip() == str(kwargs["ground_truth"]):
            return True, "That is right.", 1.0, {}
        return self._tries[instance_id] >= self.config["tries"], "That is wrong. Try again.", 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._tries[instance_id]
