"""Errors as problem documents (RFC 9457): the same texts that the client and the command show."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from millrace import errors
from millrace.errors import InvalidJob, MillraceError, Mistake
from millrace.rest import Problem, ProblemType
from millrace.validation.mistakes import explain
from services.coordinator.rest.schema import PROBLEM_TYPE

KINDS: dict[type[MillraceError], tuple[HTTPStatus, ProblemType]] = {
    errors.InvalidJob: (HTTPStatus.UNPROCESSABLE_ENTITY, ProblemType.INVALID_JOB),
    errors.InvalidRequest: (HTTPStatus.UNPROCESSABLE_ENTITY, ProblemType.INVALID_REQUEST),
    errors.InvalidState: (HTTPStatus.CONFLICT, ProblemType.INVALID_STATE),
    errors.NotFound: (HTTPStatus.NOT_FOUND, ProblemType.NOT_FOUND),
    errors.Fenced: (HTTPStatus.CONFLICT, ProblemType.FENCED),
    errors.Unavailable: (HTTPStatus.SERVICE_UNAVAILABLE, ProblemType.UNAVAILABLE),
    errors.MillraceError: (HTTPStatus.INTERNAL_SERVER_ERROR, ProblemType.INTERNAL),
}
HTTP_KINDS = {
    HTTPStatus.NOT_FOUND: (ProblemType.NOT_FOUND, "there is no such path"),
    HTTPStatus.METHOD_NOT_ALLOWED: (ProblemType.METHOD_NOT_ALLOWED, "this path does not take this method"),
}
"""Errors that the router finds by itself."""


class Refused(MillraceError):
    """The request is refused before what it asks for is looked at."""

    status: HTTPStatus
    type: ProblemType
    headers: Mapping[str, str] = {}


class Unauthorized(Refused):
    """The caller's token is missing or wrong."""

    status, type = HTTPStatus.UNAUTHORIZED, ProblemType.UNAUTHORIZED
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class Forbidden(Refused):
    """The caller may not ask this: a web page of another site, or a token with a lower role."""

    status, type = HTTPStatus.FORBIDDEN, ProblemType.FORBIDDEN


class RequestTimeout(Refused):
    """The body was not sent in time."""

    status, type = HTTPStatus.REQUEST_TIMEOUT, ProblemType.REQUEST_TIMEOUT
    headers: Mapping[str, str] = {"Connection": "close"}


class ContentTooLarge(Refused):
    status, type = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ProblemType.CONTENT_TOO_LARGE


class UnsupportedMediaType(Refused):
    status, type = HTTPStatus.UNSUPPORTED_MEDIA_TYPE, ProblemType.UNSUPPORTED_MEDIA_TYPE


class TooManyRequests(Refused):
    """More requests are in progress than the coordinator takes."""

    status, type = HTTPStatus.TOO_MANY_REQUESTS, ProblemType.TOO_MANY_REQUESTS
    headers: Mapping[str, str] = {"Retry-After": "1"}


class NotLeading(Refused):
    """Another coordinator leads."""

    status, type = HTTPStatus.SERVICE_UNAVAILABLE, ProblemType.UNAVAILABLE
    headers: Mapping[str, str] = {"Retry-After": "1"}


def install(app: FastAPI) -> None:
    """Every error of a route, and of FastAPI itself, is answered with a problem document."""
    app.add_exception_handler(MillraceError, _millrace)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)


def refusal(error: Refused) -> JSONResponse:
    """The answer to a request that is refused."""
    return _answer(error.type, error.status, error, headers=error.headers)


def _answer(
    kind: ProblemType,
    status: HTTPStatus,
    error: MillraceError,
    mistakes: Sequence[Mistake] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    title = status.phrase if kind is ProblemType.OTHER else kind.rpartition(":")[2].replace("-", " ")
    document = Problem(type=kind, title=title, status=status, detail=error.what, fix=error.fix, mistakes=list(mistakes))
    return JSONResponse(document.model_dump(mode="json"), status, headers, media_type=PROBLEM_TYPE)


async def _millrace(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, MillraceError)
    if isinstance(error, Refused):
        return refusal(error)
    status, kind = next(KINDS[each] for each in type(error).__mro__ if each in KINDS)
    return _answer(kind, status, error, error.mistakes if isinstance(error, InvalidJob) else ())


async def _validation(request: Request, error: Exception) -> JSONResponse:
    """A parameter of the path, of the query or of a header that has a wrong value."""
    assert isinstance(error, RequestValidationError)
    found = cast(Sequence[ErrorDetails], error.errors())
    mistakes = explain([{**each, "loc": each["loc"][1:]} for each in found])  # without "query", "header"
    invalid = InvalidJob.of(mistakes)
    return _answer(ProblemType.INVALID_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, invalid, mistakes)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """Any other error of a route. Its traceback is in the log."""
    what = f"{request.method} {request.url.path} failed because of a bug in the coordinator."
    answered = MillraceError(what, "report it with the coordinator's log.")
    return _answer(ProblemType.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR, answered)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, headers = HTTPStatus(error.status_code), dict(error.headers or {})
    kind, why = HTTP_KINDS.get(status, (ProblemType.OTHER, error.detail))
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    answered = MillraceError(f"{request.method} {request.url.path}: {why}.", "see /openapi.json for all paths.")
    return _answer(kind, status, answered, headers=headers)


def _methods(request: Request) -> set[str]:
    """The methods that the path of the request takes. The router itself looks at the first route of the path only."""
    found: set[str] = set()
    for route in (*request.app.state.endpoints, *request.app.routes):
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found
