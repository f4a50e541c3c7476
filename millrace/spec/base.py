"""The base of every part of a job spec: unknown fields are refused, values are final, numbers are finite."""

import json
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
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

    @field_validator("*", mode="before")
    @classmethod
    def true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts `true` as 1; in a job file it is a slip."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = {annotation, *get_args(annotation)}
            if bool not in kinds and (numbers := kinds & {int, float}):
                kind = "int" if int in numbers else "float"
                raise PydanticCustomError(f"{kind}_type", "it is no number")  # type: ignore[arg-type]
        return value
