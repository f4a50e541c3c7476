"""Parameters that several routes take."""

import re
from typing import Annotated

from fastapi import Depends, Path

from services.coordinator.state.job import no_such_job

JOB_ID = r"^job-[0-9a-f]{12}$"
LARGEST_STEP = 2**31 - 1


async def _id(job_id: Annotated[str, Path(json_schema_extra={"pattern": JOB_ID})]) -> str:
    """A job's id. The store makes keys of it, so nothing else may get there."""
    if not re.fullmatch(JOB_ID, job_id):
        raise no_such_job(job_id)
    return job_id


Id = Annotated[str, Depends(_id)]
