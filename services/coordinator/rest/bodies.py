"""A job spec, or fields of one, in the body of a request."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Path, Request

from millrace.errors import InvalidJob
from millrace.rest.users import Role
from millrace.spec.document import UNREADABLE, Document
from millrace.validation.kinds import kind_of
from services.coordinator.rest.problems import ContentTooLarge, RequestTimeout, UnsupportedMediaType
from services.coordinator.rest.users import Caller
from services.coordinator.state.job import no_such_job

MAX_BYTES = 16 << 20
RECEIVE_S = 30.0
"""How long a caller may take to send a body."""


def _yaml(body: bytes) -> Any:
    return Document(body).tree


READERS: Mapping[str, Callable[[bytes], Any]] = {
    "application/json": json.loads,
    "application/yaml": _yaml,
    "application/x-yaml": _yaml,
    "text/yaml": _yaml,
    "text/x-yaml": _yaml,
}
"""Keyed by content type. A web page can send none of these to another site unless that site allows it (CORS)."""


async def tree(request: Request) -> Any:
    """The body as plain mappings, lists and values.

    Raises UnsupportedMediaType, ContentTooLarge, RequestTimeout, and InvalidJob if the body cannot be parsed.
    """
    kind = request.headers.get("content-type", "")
    read = READERS.get(kind.partition(";")[0].strip().lower())
    if read is None:
        fix = "send `Content-Type: application/json`, or `application/yaml`."
        raise UnsupportedMediaType(f"Content-Type: {json.dumps(kind)}: is neither JSON nor YAML.", fix)
    try:
        async with asyncio.timeout(RECEIVE_S):
            body = await _whole(request)
    except TimeoutError as error:
        raise RequestTimeout(f"the body was not sent within {RECEIVE_S:g} s.", "send it faster.") from error
    try:
        return await asyncio.to_thread(read, body)
    except UNREADABLE as error:
        raise InvalidJob(f"the body cannot be read: {error}.", "send a job spec as JSON or YAML.") from error


async def fields(request: Request) -> dict[str, Any]:
    """The body as a mapping; empty if the request has no body. Raises as `tree` does."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    found = await tree(request)
    if not isinstance(found, dict):
        raise InvalidJob(f"the body is {kind_of(found)}, not fields of a job spec.", "send a mapping.")
    return found


async def _whole(request: Request) -> bytes:
    """Reads the whole body. One that is too large is read too, and thrown away: many clients do not look at the answer
    before they have sent everything."""
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BYTES:
            body += part
    if size > MAX_BYTES:
        what = f"the body has {size} bytes, more than {MAX_BYTES}."
        raise ContentTooLarge(what, "put data and rewards into files, and name the files in the job spec.")
    return bytes(body)


JOB_ID = r"^job-[0-9a-f]{12}$"
LARGEST_STEP = 2**31 - 1


async def _id(request: Request, job_id: Annotated[str, Path(json_schema_extra={"pattern": JOB_ID})]) -> str:
    """The id of a job that the caller may know of. The store makes keys of it, so nothing else may get there."""
    if not re.fullmatch(JOB_ID, job_id):
        raise no_such_job(job_id)
    caller: Caller = request.state.caller
    if caller.role is not Role.ADMIN:
        found = await request.app.state.index.without_specs([job_id])
        if not found or not caller.sees(found[0].user):
            raise no_such_job(job_id)
    return job_id


Id = Annotated[str, Depends(_id)]
