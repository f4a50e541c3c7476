"""Errors as problem documents (RFC 9457): the same texts that the client and the command show."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from millrace import errors
from millrace.errors import InvalidJob, MillraceError, Mistake
from millrace.rest import Problem
from millrace.validation.mistakes import explain
from services.coordinator.rest.schema import PROBLEM_TYPE

STATUSES: dict[type[MillraceError], HTTPStatus] = {
    errors.InvalidJob: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.InvalidState: HTTPStatus.CONFLICT,
    errors.NotFound: HTTPStatus.NOT_FOUND,
    errors.Fenced: HTTPStatus.CONFLICT,
    errors.Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.MillraceError: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Refused(MillraceError):
    """The request is refused before what it asks for is looked at."""

    status = HTTPStatus.BAD_REQUEST


class Unauthorized(Refused):
    """The caller's token is missing or wrong."""

    status = HTTPStatus.UNAUTHORIZED


class Forbidden(Refused):
    """The request comes from a web page that may not ask this coordinator."""

    status = HTTPStatus.FORBIDDEN


class ContentTooLarge(Refused):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class UnsupportedMediaType(Refused):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


def install(app: FastAPI) -> None:
    """Every error of a route, and of FastAPI itself, is answered with a problem document."""
    app.add_exception_handler(MillraceError, _millrace)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)


def _answer(kind: str, status: int, what: str, fix: str, mistakes: Sequence[Mistake] = ()) -> JSONResponse:
    """`kind` is the name of an error class, or words."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind).replace(" ", "-").lower()
    document = Problem(
        type=f"urn:millrace:{name}",
        title=name.replace("-", " "),
        status=status,
        detail=what,
        fix=fix,
        mistakes=list(mistakes),
    )
    headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(document.model_dump(mode="json"), status, headers, media_type=PROBLEM_TYPE)


async def _millrace(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, MillraceError)
    if isinstance(error, Refused):
        return _answer(type(error).__name__, error.status, error.what, error.fix)
    kind = next(k for k in type(error).__mro__ if k in STATUSES)
    mistakes = error.mistakes if isinstance(error, InvalidJob) else ()
    return _answer(kind.__name__, STATUSES[kind], error.what, error.fix, mistakes)


async def _validation(request: Request, error: Exception) -> JSONResponse:
    """A parameter of the path, of the query or of a header that has a wrong value."""
    assert isinstance(error, RequestValidationError)
    found = cast(Sequence[ErrorDetails], error.errors())
    mistakes = explain([{**each, "loc": each["loc"][1:]} for each in found])  # without "query", "header"
    invalid = InvalidJob.of(mistakes)
    return _answer("InvalidRequest", HTTPStatus.UNPROCESSABLE_ENTITY, invalid.what, invalid.fix, mistakes)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """Any other error of a route. Its traceback is in the log."""
    what = f"{request.method} {request.url.path} failed because of a bug in the coordinator."
    return _answer("Bug", HTTPStatus.INTERNAL_SERVER_ERROR, what, "report it with the coordinator's log.")


HTTP_REASONS = {
    HTTPStatus.NOT_FOUND: "there is no such path",
    HTTPStatus.METHOD_NOT_ALLOWED: "this path does not take this method",
}


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    what = f"{request.method} {request.url.path}: {HTTP_REASONS.get(status, error.detail)}."
    return _answer(status.phrase, status, what, "see /openapi.json for all paths.")
