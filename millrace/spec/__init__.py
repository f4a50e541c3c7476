"""The job spec. `load(path)` and `parse(mapping)` give a `JobSpec` or raise `InvalidJob` that lists every mistake."""

from millrace.spec.checking.load import load, parse
from millrace.spec.job import JobSpec

__all__ = ["JobSpec", "load", "parse"]
