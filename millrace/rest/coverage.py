"""How much of the held-out data a score comes from. Every place that shows a held-out score shows this next to it."""

from pydantic import BaseModel, Field


class Coverage(BaseModel):
    """The prompts of one evaluation."""

    scored: int = Field(description="Held-out prompts whose answers were scored. The score is their mean.")
    asked: int = Field(description="Held-out prompts of the evaluation.")

    @classmethod
    def of(cls, scored: float | None, asked: float | None) -> "Coverage | None":
        """None if it is not known, as of jobs of an earlier release."""
        return cls(scored=int(scored or 0), asked=int(asked)) if asked else None

    def __str__(self) -> str:
        return f"{self.scored} of {self.asked}"


def covered(figure: str, coverage: Coverage | None, always: bool = False) -> str:
    """`0.420 (107 of 256)`. The score of every prompt stays `0.420`, unless the coverage is `always` wanted."""
    if coverage is None or (coverage.scored == coverage.asked and not always):
        return figure
    return f"{figure} ({coverage})"
