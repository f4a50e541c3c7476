"""What the annotations of a pydantic model say of the fields below it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

Location = Sequence[int | str]
"""Names of fields from the root of a model downwards, and places in lists."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a `str` that is one of names known only at run time: `Annotated[str, OneOf(names)]`."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


def model_in(annotation: object) -> type[BaseModel] | None:
    """The model that a value of this annotation is, or may be; None if it is none."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def model_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model of the level at `location` of a tree of `root`; None if there is no such level."""
    found: type[BaseModel] | None = root
    for step in location:
        field = found.model_fields.get(str(step)) if found is not None else None
        found = model_in(field.annotation) if field is not None else None
    return found


def field_at(root: type[BaseModel], location: Location) -> FieldInfo | None:
    """The field at `location` of a tree of `root`, or the field whose list is indexed there; None if there is
    none."""
    names = [step for step in location if not isinstance(step, int)]
    model = model_at(root, names[:-1])
    return model.model_fields.get(names[-1]) if model is not None and names else None


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The texts that a field, or an entry of its list, is one of; empty for a field of another kind."""
    return next(filter(None, map(_choices, (*field.metadata, field.annotation))), ())


def _choices(annotation: Any) -> tuple[str, ...]:
    if isinstance(annotation, OneOf):
        return annotation.names
    if get_origin(annotation) is Literal:
        return tuple(each for each in get_args(annotation) if isinstance(each, str))
    return next(filter(None, map(_choices, get_args(annotation))), ())


def every_path(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The path of every field of a tree of `model`, upper levels before those below them."""
    yield from (above + name for name in model.model_fields)
    for name, field in model.model_fields.items():
        if (inner := model_in(field.annotation)) is not None:
            yield from every_path(inner, f"{above}{name}.")


class StrictModel(BaseModel):
    """One level of a tree: unknown fields are refused, values cannot be changed afterwards, numbers are finite.

    `Field(examples=[...])` of a mapping or a list is what an error shows as an example of it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
