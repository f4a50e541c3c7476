"""The job spec. `load(path)` and `parse(mapping)` give a `JobSpec` or raise `InvalidJob` that lists every mistake."""

from millrace.spec.job import JobSpec
from millrace.spec.load import load, parse, received

__all__ = ["JobSpec", "load", "parse", "received"]
