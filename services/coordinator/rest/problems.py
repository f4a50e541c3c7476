"""Errors as problem documents (RFC 9457)."""

import re
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from millrace import errors
from millrace.rest import Problem

STATUSES: dict[type[errors.MillraceError], int] = {
    errors.InvalidJob: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.InvalidState: HTTPStatus.CONFLICT,
    errors.NotFound: HTTPStatus.NOT_FOUND,
    errors.Fenced: HTTPStatus.CONFLICT,
    errors.Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.MillraceError: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Refused(errors.MillraceError):
    """A request that is refused for how it came, whatever it asks."""

    status = HTTPStatus.BAD_REQUEST


class Unauthorized(Refused):
    """The caller's token is missing or wrong."""

    status = HTTPStatus.UNAUTHORIZED


class Forbidden(Refused):
    """It comes from where nobody may ask."""

    status = HTTPStatus.FORBIDDEN


class ContentTooLarge(Refused):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class UnsupportedMediaType(Refused):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


def problem(kind: str, status: int, detail: str, fix: str) -> JSONResponse:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind).lower()
    title = name.replace("-", " ")
    document = Problem(type=f"urn:millrace:{name}", title=title, status=status, detail=detail, fix=fix)
    headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(document.model_dump(), status, headers, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    app.add_exception_handler(errors.MillraceError, _millrace)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)


async def _millrace(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.MillraceError)
    if isinstance(error, Refused):
        return problem(type(error).__name__, error.status, error.what, error.fix)
    kind = next(k for k in type(error).__mro__ if k in STATUSES)
    return problem(kind.__name__, STATUSES[kind], error.what, error.fix)


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    mistakes = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return problem(
        "InvalidRequest", HTTPStatus.UNPROCESSABLE_ENTITY, mistakes, "see /openapi.json for what this path takes."
    )


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """Whatever else a route raises. Its traceback is in the log."""
    what = f"{request.method} {request.url.path} met a bug: {type(error).__name__}."
    return problem("Bug", HTTPStatus.INTERNAL_SERVER_ERROR, what, "report it with the coordinator's log.")


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return problem(HTTPStatus(error.status_code).phrase, error.status_code, detail, "see /openapi.json for all paths.")
