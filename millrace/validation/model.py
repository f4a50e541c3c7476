"""The base of every model that a user fills in."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """One level of a tree: unknown fields are refused, values cannot be changed afterwards, numbers are finite.

    `Field(examples=[...])` of a mapping or a list is what an error shows as an example of it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
