"""Types with ranges for the options in an algorithm's signature. Needs no torch.

A value outside its range is refused when the job is submitted. Numbers are strict: "0.2" and true are not numbers.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from millrace.validation.limits import LARGEST_NUMBER, SMALLEST_POSITIVE


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError("the lower bound has to be below the upper bound")
    return bounds


def _about_one(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] <= 1 <= bounds[1]:
        raise ValueError("the bounds have to enclose 1, the ratio of equal policies")
    return bounds


Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, ge=-LARGEST_NUMBER, le=LARGEST_NUMBER, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True, ge=-int(LARGEST_NUMBER), le=int(LARGEST_NUMBER))]
Count = Annotated[int, Field(strict=True, ge=1, le=int(LARGEST_NUMBER))]
"""A whole number, at least 1."""
Positive = Annotated[float, Field(strict=True, ge=SMALLEST_POSITIVE, le=LARGEST_NUMBER, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
AboveOne = Annotated[float, Field(strict=True, gt=1, le=LARGEST_NUMBER, allow_inf_nan=False)]
OpenFraction = Annotated[float, Field(strict=True, gt=0, lt=1)]
"""Between 0 and 1, both excluded."""
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
"""From 0 to 1, both included."""
Numbers = tuple[Number, ...]
Bounds = Annotated[tuple[Number, Number], AfterValidator(_ascending)]
"""[low, high] with low < high."""
RatioBounds = Annotated[tuple[NonNegative, Positive], AfterValidator(_ascending), AfterValidator(_about_one)]
"""[low, high] around a ratio of probabilities: 0 <= low <= 1 <= high."""

TYPES: dict[str, Any] = {
    "bool": Flag,
    "int": Integer,
    "float": Number,
    "str": Annotated[str, Field(strict=True)],
    "Count": Count,
    "Positive": Positive,
    "NonNegative": NonNegative,
    "AboveOne": AboveOne,
    "OpenFraction": OpenFraction,
    "Fraction": Fraction,
    "Numbers": Numbers,
    "Bounds": Bounds,
    "RatioBounds": RatioBounds,
}
"""The types that an option's annotation may name. `Literal[...]` and `| None` are also possible."""
