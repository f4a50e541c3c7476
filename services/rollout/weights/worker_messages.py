"""The messages between a replica and its engine's workers, as JSON: requests, replies, introductions, welcomes."""

import base64
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter

from millrace.errors import InvalidJob, MillraceError, PublicationFailed
from services.rollout.weights.worker_methods import WorkerMethods

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Introduction:
    """What a worker says of itself when it connects. Facts that its engine learns in another way are left out."""

    rank: int
    dtype: str = ""
    device: str = ""
    max_requests: int = 0
    """Requests that the engine runs at once."""
    cache_tokens: int = 0
    """Tokens whose keys and values fit in the engine's cache."""
    secret: str = ""
    """Secret that shows that the replica gave this worker its address."""


@dataclass(frozen=True)
class Welcome:
    """The replica's answer to an introduction."""

    clock: float
    """The replica's time.monotonic(), in which the deadlines of requests are."""


@dataclass(frozen=True)
class Request:
    """A call of one method in every worker."""

    number: int
    method: str
    arguments: Sequence[Any]
    paused: bool
    """The method may only run while generation is paused."""
    deadline: float
    """When the replica stops waiting: time.monotonic() of its host. In a worker, of the worker's host."""

    @property
    def expired(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(frozen=True)
class Failure:
    """Why a method failed: the fields of the error that the replica raises for it."""

    what: str
    fix: str
    invalid: bool = False
    """The engine refuses the job: the error is InvalidJob, otherwise PublicationFailed."""


@dataclass(frozen=True)
class Reply:
    """One worker's answer to the request of the same number, or its failure."""

    number: int
    answer: Any
    failure: Failure | None = None

    def result(self, method: Callable[..., Answer]) -> Answer:
        """The answer, of the type that `method` declares. Raises PublicationFailed if the method failed, InvalidJob
        if it refused the job."""
        if self.failure is not None:
            kind = InvalidJob if self.failure.invalid else PublicationFailed
            raise kind(self.failure.what, self.failure.fix)
        answer: Answer = _answer_type(method).validate_python(self.answer)
        return answer


def carry_out(receiver: WorkerMethods, request: Request) -> Reply:
    """Calls the receiver's method. Every exception becomes the reply, because the replica has to know of it."""
    try:
        return Reply(request.number, getattr(receiver, request.method)(*request.arguments))
    except MillraceError as error:
        return Reply(request.number, None, Failure(error.what, error.fix, isinstance(error, InvalidJob)))
    except Exception as error:
        what = f"{request.method} failed in the engine: {type(error).__name__}: {error}"
        return Reply(request.number, None, Failure(what, ""))


def encode(message: Introduction | Welcome | Request | Reply) -> bytes:
    """JSON, with bytes in base64 under the key `bytes`."""
    return json.dumps(message, default=_plain, separators=(",", ":")).encode()


def decode_request(data: bytes) -> Request:
    return Request(**decode(data))


def decode_reply(data: bytes) -> Reply:
    fields = decode(data)
    failure = fields["failure"]
    return Reply(fields["number"], fields["answer"], None if failure is None else Failure(**failure))


def decode(data: bytes) -> dict[str, Any]:
    """The fields of a message."""
    fields: dict[str, Any] = json.loads(data, object_hook=_with_bytes)
    return fields


@functools.cache
def _answer_type(method: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(method)["return"])


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(value).decode()}
    return vars(value) if is_dataclass(value) else int(value)


def _with_bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["bytes"]) if found.keys() == {"bytes"} else found
