"""What the HTTP endpoint of a replica refuses, and how each dialect reports it."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse

from millrace.errors import MillraceError, Mistake

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
