"""The output folder of a job: what its placeholders stand for, and whether an earlier job left checkpoints there."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from millrace.errors import Mistake, wrong_value
from millrace.ids import JobId, new_job_id
from millrace.spec.job import PLACEHOLDER, JobSpec

RUNS = "MILLRACE_RUNS"
"""Environment variable of the coordinator with the folder that `{runs}` stands for."""


def with_output(spec: JobSpec, job_id: JobId | None = None) -> JobSpec:
    """The spec with values in the place of the placeholders of `output`. Without a `job_id` that of a job that will
    not exist."""
    if PLACEHOLDER.search(spec.output) is None:
        return spec
    values = {
        "name": spec.name.replace(" ", "-"),
        "id": job_id or new_job_id(),
        "date": time.strftime("%Y-%m-%d"),
        "runs": os.environ.get(RUNS) or str(Path.home() / "millrace" / "runs"),
    }
    output = PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), spec.output)
    return spec.model_copy(update={"output": output})


def left_checkpoints(output: str, others: Sequence[str] = ()) -> Iterator[Mistake]:
    """A mistake where the folder holds checkpoints. `others` are more ways to correct it."""
    checkpoints = Path(output) / "checkpoints"
    if os.path.isdir(checkpoints) and any(checkpoints.glob("step-*")):
        reason = f"{checkpoints} holds checkpoints of an earlier job, which this one would replace"
        fixes = ["give another folder ({id} in its path makes one for each job)", *others, "or remove them"]
        yield wrong_value("output", output, reason, f"{', '.join(fixes)}.")
