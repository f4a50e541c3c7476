"""The base of every part of a job spec: unknown fields are refused, values are final, numbers are finite."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError


class Part(BaseModel):
    """One level of the tree."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _finite_options(cls, value: Any) -> Any:
        """A spec is kept and sent as JSON, which has no other numbers. pydantic itself does not look into options."""
        if isinstance(value, dict):
            try:
                json.dumps(value, allow_nan=False, default=str, skipkeys=True)
            except ValueError as error:
                raise PydanticCustomError("finite_number", "Its numbers should be finite") from error
        return value
