"""Requests over HTTP: who sends them, what is in them, whether their sender still waits; what is refused, and how each
dialect reports it; and server-sent events as answers. A turn is sent when it is whole, as engines return it. Until then
comments keep the connection alive.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from millrace.errors import MillraceError, Mistake
from millrace.validation.mistakes import explain
from services.rollout.dialects.turns import SampledTurn

RETRY_AFTER_S = 2
"""Seconds after which a caller that found nothing may ask again."""


@dataclass(frozen=True)
class Kind:
    """A class of refusals: the status of HTTP, and the names that the two dialects have for it."""

    status: int
    openai: str
    anthropic: str
    code: str | None = None
    retry: bool = False
    """Whether the same request may succeed later."""


class Refusals(Enum):
    """The classes of refusals. Clients repeat a request that was answered with 429 or 503, and no other."""

    INVALID = Kind(400, "invalid_request_error", "invalid_request_error")
    """The request cannot be read, or asks for what is not given."""
    TOO_LONG = Kind(400, "invalid_request_error", "invalid_request_error", "context_length_exceeded")
    """The conversation leaves no room for another turn."""
    UNAUTHENTICATED = Kind(401, "authentication_error", "authentication_error", "invalid_api_key")
    """The key is missing or wrong."""
    UNKNOWN = Kind(404, "not_found_error", "not_found_error", "not_found")
    """There is no such session."""
    ENDED = Kind(410, "invalid_request_error", "invalid_request_error", "session_ended")
    """The episode of the session is over."""
    TOO_LARGE = Kind(413, "invalid_request_error", "request_too_large")
    """The body has too many bytes."""
    BUSY = Kind(429, "rate_limit_error", "rate_limit_error", "no_episode_waits", retry=True)
    """No episode waits for an agent now."""
    FULL = Kind(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded", retry=True)
    """The queue of requests is full."""
    UNAVAILABLE = Kind(503, "service_unavailable_error", "overloaded_error", retry=True)
    """The engine generates nothing now."""


class Refused(MillraceError):
    """A request that is refused."""

    def __init__(self, kind: Refusals, what: str, fix: str = "", field: str | None = None) -> None:
        super().__init__(what, fix)
        self.kind = kind
        self.field = field

    @classmethod
    def of(cls, mistake: Mistake) -> "Refused":
        """The refusal of a request with this mistake."""
        return cls(Refusals.INVALID, mistake.what, mistake.fix, mistake.field or None)


def openai_error(refused: Refused) -> dict[str, Any]:
    """The refusal in the form of OpenAI's API."""
    kind = refused.kind.value
    error = {"message": str(refused), "type": kind.openai, "param": refused.field, "code": kind.code}
    return {"error": error}


def anthropic_error(refused: Refused) -> dict[str, Any]:
    """The refusal in the form of Anthropic's API."""
    return {"type": "error", "error": {"type": refused.kind.value.anthropic, "message": str(refused)}}


def refusal(refused: Refused, *, anthropic: bool = False) -> JSONResponse:
    """The answer to a request that is refused."""
    kind = refused.kind.value
    headers = {"retry-after": str(RETRY_AFTER_S)} if kind.retry else {}
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = anthropic_error(refused) if anthropic else openai_error(refused)
    return JSONResponse(body, kind.status, headers)


LARGEST_BODY = 64 << 20
"""Bytes of a request's body."""
BODY_S = 60.0
"""How long a body may take to arrive."""
Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")
Answer = Callable[[Request], Awaitable[Response]]


def key_of(request: Request) -> str:
    """The key that came with a request, as OpenAI's clients (`Authorization: Bearer`) or Anthropic's (`x-api-key`)
    send it; empty if none did."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def check_token(request: Request, secret: str) -> None:
    """Raises Refused for a caller without the token of the deployment; if there is none (`secret` is empty), for
    the page of a browser: it may be anybody's."""
    if secret and not hmac.compare_digest(key_of(request).encode(), secret.encode()):
        what, fix = "the token is missing or wrong.", "send `Authorization: Bearer <MILLRACE_TOKEN>`."
        raise Refused(Refusals.UNAUTHENTICATED, what, fix)
    if not secret and "origin" in request.headers:
        fix = "set MILLRACE_TOKEN, or call from a program that is no browser."
        raise Refused(Refusals.UNAUTHENTICATED, "a web page may not ask here.", fix)


async def answered_or_refused(request: Request, answer: Answer, *, anthropic: bool = False) -> Response:
    """What `answer` says to a request. A refusal has the form that OpenAI's clients expect, or Anthropic's."""
    try:
        return await answer(request)
    except Refused as error:
        return refusal(error, anthropic=anthropic)
    except ClientDisconnect:
        return Response(status_code=499)


async def body_of(request: Request, model: type[Model], largest: int = LARGEST_BODY) -> Model:
    """The body, of at most `largest` bytes, checked. `request.state.arrived` is set to the time at which its last byte
    came, on the clock `time.perf_counter`. Raises Refused."""
    given = await _json(request, min(largest, LARGEST_BODY))
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise Refused.of(explain(error.errors(), model)[0]) from error


async def _json(request: Request, largest: int) -> Any:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                if (size := size + len(part)) > largest:
                    what = f"the body has more than {largest} bytes."
                    raise Refused(Refusals.TOO_LARGE, what, "send a shorter history.")
    except TimeoutError as error:
        raise Refused(Refusals.INVALID, f"the body did not arrive within {BODY_S:g} s.", "send it faster.") from error
    request.state.arrived = time.perf_counter()
    try:
        return read_json(b"".join(parts).decode() or "{}")
    except (ValueError, RecursionError) as error:
        raise Refused(Refusals.INVALID, f"the body is not JSON: {error}.", "send a JSON object.") from error


def read_json(text: str) -> Any:
    """The value that is written in `text`. Raises ValueError, also for half of a surrogate pair, which is no character
    and no library takes; RecursionError."""
    given = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(given, ensure_ascii=False).encode()
    return given


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the sender of the request goes away. Raises ClientDisconnect."""
    working, away = asyncio.create_task(work), asyncio.create_task(gone(request))
    try:
        await asyncio.wait({working, away}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        away.cancel()
        working.cancel()


async def gone(request: Request) -> None:
    """Returns when the sender of the request has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


STATUS_S = 1.0
"""A request that is refused within this time gets a status; one that is refused later, an event."""
PING_S = 5.0
"""Time between two comments."""
Events = Callable[[SampledTurn], Iterable[str]]


def event(data: Mapping[str, Any], name: str = "") -> str:
    """One event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def streamed(
    request: Request, work: Coroutine[Any, Any, SampledTurn], events: Events, refused: Callable[[Refused], str]
) -> Response:
    """The turn of `work` as `events`. It is cancelled when the sender of the request goes away. Raises Refused and
    ClientDisconnect if they come before the stream has begun."""
    sampling, away = asyncio.create_task(work), asyncio.create_task(gone(request))
    both = {sampling, away}
    try:
        await asyncio.wait(both, timeout=STATUS_S, return_when=asyncio.FIRST_COMPLETED)
        if sampling.done():
            sampling.result()
        elif away.done():
            raise ClientDisconnect
    except BaseException:
        _end(both)
        raise
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(sampling, away, events, refused), 200, headers, "text/event-stream")


async def _events(
    sampling: asyncio.Task[SampledTurn], away: asyncio.Task[None], events: Events, refused: Callable[[Refused], str]
) -> AsyncIterator[str]:
    both = {sampling, away}
    try:
        while not sampling.done() and not away.done():
            await asyncio.wait(both, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                yield ": the turn is being sampled\n\n"
        if sampling.done():
            for each in events(sampling.result()):
                yield each
    except Refused as error:
        yield refused(error)
    finally:
        _end(both)


def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
