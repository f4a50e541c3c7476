"""The base of every part of a job spec: unknown fields are refused, values are final, numbers are finite."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """One level of the tree."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
