"""Requests to a coordinator's REST API, repeated while it does not answer, and what its answers hold.

MILLRACE_URL may name several coordinators, with commas: one leads, and the client finds it again after a change.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from millrace import errors
from millrace.events import Event
from millrace.rest import Problem

if TYPE_CHECKING:
    import httpx
    from pydantic import BaseModel

    View = TypeVar("View", bound=BaseModel)

DEFAULT_URL = "http://127.0.0.1:7700"
TIMEOUT_S = 30.0
STREAM_TIMEOUT_S = 60.0
"""Seconds without a line after which an event stream is opened again; the coordinator sends comments more often."""
LED_FOR_S = 2.0
"""A coordinator of several that led so lately is asked without looking again who leads."""
LEADER_WITHIN_S = 2.0
"""How long one may take to say whether it leads."""
TEMPORARY = (429, 502, 503, 504)
"""Statuses while the coordinator has too much to do, or Redis or a proxy is not available."""

ERRORS: dict[int, type[errors.MillraceError]] = {
    **dict.fromkeys((400, 413, 415, 422), errors.InvalidJob),
    **dict.fromkeys((403, 409), errors.InvalidState),
    404: errors.NotFound,
    **dict.fromkeys(TEMPORARY, errors.Unavailable),
}


def default_url() -> str:
    """The URL of the local stack."""
    return DEFAULT_URL if not os.environ.get("MILLRACE_TLS_CA") else DEFAULT_URL.replace("http:", "https:")


class Connection:
    """The requests that all calls of a `Client` are made of."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = 10.0,
    ) -> None:
        given = url or os.environ.get("MILLRACE_URL") or default_url()
        self._urls = [each.strip().rstrip("/") for each in given.split(",")]
        self.url = self._urls[0]
        """Address of the coordinator that is asked."""
        self._led_at = -math.inf
        """Time at which that one led last, in time.monotonic()."""
        self._token = token
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._clients: dict[str, httpx.Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def ready(self) -> bool:
        """Whether the coordinator can take jobs: it runs, leads and reaches its Redis. Asks only once."""
        return any(self._is_ready(url, 5.0) for url in self._in_order())

    def _in_order(self) -> list[str]:
        """The addresses, that of the coordinator that led last first."""
        return [self.url, *(url for url in self._urls if url != self.url)]

    def _is_ready(self, url: str, within_s: float) -> bool:
        import httpx

        try:
            ready = self._client(url).get("/readyz", timeout=within_s).is_success
        except httpx.HTTPError:
            return False
        if ready:
            self.url, self._led_at = url, time.monotonic()
        return ready

    def _connection(self) -> httpx.Client:
        """A client of the coordinator that leads, if several are named."""
        if len(self._urls) > 1 and time.monotonic() - self._led_at > LED_FOR_S:
            any(self._is_ready(url, LEADER_WITHIN_S) for url in self._in_order())
        return self._client(self.url)

    def _client(self, url: str) -> httpx.Client:
        if url not in self._clients:
            import httpx

            from millrace.wire.reach import may_take_proxy
            from millrace.wire.tls import verifying

            secret = self._secret()
            try:
                address = urlsplit(url)
                if address.scheme not in ("http", "https"):
                    raise ValueError("does not begin with http:// or https://")
                if not address.hostname:
                    raise ValueError("names no host")
                if self._urls.count(url) > 1:
                    raise ValueError("comes twice")
                self._clients[url] = httpx.Client(
                    base_url=url,
                    headers={"Authorization": f"Bearer {secret}"} if secret else {},
                    timeout=self._timeout_s,
                    trust_env=may_take_proxy(url),
                    verify=verifying(url),
                )
            except (ValueError, httpx.InvalidURL) as error:
                fix = f"give an address like {DEFAULT_URL} with --url or MILLRACE_URL; of several, with commas."
                wrong = errors.wrong_value("MILLRACE_URL", url, str(error), fix)
                raise errors.MillraceError(wrong.what, wrong.fix) from error
        return self._clients[url]

    def _secret(self) -> str:
        from millrace.wire.channel import sendable, token

        return token() if self._token is None else sendable(self._token)

    def _ask(self, method: str, path: str, *, stream: bool = False, **parts: Any) -> httpx.Response:
        """One call, repeated while the coordinator is not available. Every call may be repeated: a submission carries
        its key, all others are idempotent. With `stream` the body of the answer is not read yet, and the caller closes
        the answer. Raises MillraceError."""
        import httpx

        began, wait_s = time.monotonic(), 0.1
        while True:
            connection = self._connection()
            try:
                response = connection.send(connection.build_request(method, path, **parts), stream=stream)
                if response.is_success:
                    return response
                response.read()
                failure = self._unauthorized() if response.status_code == 401 else _error_of(response)
                if response.status_code not in TEMPORARY:
                    raise failure
            except httpx.RequestError as error:
                timed_out = isinstance(error, httpx.TimeoutException)
                within_s = time.monotonic() - began if timed_out else self._patience_s
                failure = self._unreachable(error, method, path, within_s)
            self._led_at = -math.inf
            if time.monotonic() + wait_s > began + self._patience_s:
                raise failure
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)

    def _unauthorized(self) -> errors.InvalidState:
        """The error if the coordinator refuses the token."""
        fix = "set MILLRACE_TOKEN, or MILLRACE_TOKEN_FILE, to the secret that the coordinator was started with."
        if not self._secret():
            return errors.InvalidState(f"MILLRACE_TOKEN: is not set, and {self.url} asks for a token.", fix)
        return errors.InvalidState(f"MILLRACE_TOKEN: is not the token of the coordinator at {self.url}.", fix)

    def _view(self, kind: type[View], method: str, path: str, **parts: Any) -> View:
        answer = self._ask(method, path, **parts)
        with self._parsing():
            return kind.model_validate_json(answer.content)

    def _views(self, kind: type[View], path: str, **query: Any) -> list[View]:
        answer = self._ask("GET", path, params={name: value for name, value in query.items() if value is not None})
        with self._parsing():
            return [kind.model_validate(row) for row in answer.json()]

    def _stream(self, path: str, after: str, follow: bool) -> Iterator[Event]:
        """Yields the events of one connection, until the coordinator closes it or sends nothing for too long."""
        import httpx

        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = httpx.Timeout(self._timeout_s, read=STREAM_TIMEOUT_S)
        answer = self._ask("GET", path, stream=True, headers=headers, params={"follow": follow}, timeout=timeout)
        with contextlib.closing(answer), contextlib.suppress(httpx.TransportError), self._parsing():
            yield from _events(_lines(answer.iter_text()))

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        """Raises MillraceError if the code inside finds that an answer is not what this client expects."""
        try:
            yield
        except (TypeError, ValueError) as error:
            what = f"{self.url} did not answer as a coordinator of this release does."
            fix = "check that --url or MILLRACE_URL is the address of a coordinator, and compare `millrace --version`."
            raise errors.MillraceError(what, fix) from error

    def _unreachable(self, error: Exception, method: str, path: str, within_s: float) -> errors.Unavailable:
        from millrace.wire.tls.faults import diagnose

        with contextlib.suppress(ValueError):  # of a port that is none
            address = urlsplit(self.url)
            port = address.port or (443 if address.scheme == "https" else 80)
            if (fault := diagnose(address.hostname or "", port, encrypted=address.scheme == "https")) is not None:
                return fault
        return errors.Unavailable(
            f"the coordinator at {self.url} did not answer {method} {path} within {within_s:.3g} s: {error}.",
            "start one with `millrace up`, or give its address with --url or MILLRACE_URL.",
        )


def _error_of(response: httpx.Response) -> errors.MillraceError:
    """The error that the coordinator's problem document describes."""
    kind = ERRORS.get(response.status_code, errors.MillraceError)
    try:
        problem = Problem.model_validate_json(response.content)
    except ValueError:
        is_page = "html" in response.headers.get("content-type", "")
        text = response.reason_phrase if is_page else response.text.strip()[:500] or response.reason_phrase
        what = f"{response.request.url} answered {response.status_code}: {text}"
        return kind(what, "check that --url or MILLRACE_URL is the address of a coordinator.")
    if kind is errors.InvalidJob:
        return errors.InvalidJob(problem.detail, problem.fix, problem.mistakes)
    return kind(problem.detail, problem.fix)


def _lines(parts: Iterator[str]) -> Iterator[str]:
    """Splits text at line feeds only. Python and httpx would also split at characters that an event may hold."""
    rest = ""
    for part in parts:
        *lines, rest = (rest + part).split("\n")
        yield from (line.removesuffix("\r") for line in lines)


def _events(lines: Iterator[str]) -> Iterator[Event]:
    """Parses server-sent events from the lines of their stream. Raises ValueError."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data))
            data = []
