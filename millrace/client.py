"""The coordinator's REST API from Python.

    client = Client()                      # MILLRACE_URL, or the local stack's http://127.0.0.1:7700
    job = client.submit(load("job.yaml"))
    for event in client.events(job.id):
        print(event.message)

Every call has a deadline. A coordinator that cannot be reached, or does not reach its Redis, is tried again for
`patience_s`, so that a restart in the middle of a job goes unnoticed. Errors are `MillraceError`s, each with its fix.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from millrace import errors
from millrace.events import Event
from millrace.rest import (
    FleetView,
    JobState,
    JobView,
    LedgerView,
    MemberView,
    Problem,
    SampleView,
    StepMetrics,
)

if TYPE_CHECKING:
    import httpx
    from pydantic import BaseModel

    from millrace.spec import JobSpec

    View = TypeVar("View", bound=BaseModel)

DEFAULT_URL = "http://127.0.0.1:7700"
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
TIMEOUT_S = 30.0
STREAM_TIMEOUT_S = 60.0
"""An event stream that is silent for so long is opened again; the coordinator sends comments more often."""


class Client:
    """One coordinator. `token` is the secret that the services share, MILLRACE_TOKEN unless given."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = 10.0,
    ) -> None:
        self.url = (url or os.environ.get("MILLRACE_URL") or DEFAULT_URL).rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._http: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    # Jobs.

    def submit(self, spec: JobSpec | Mapping[str, Any], key: str | None = None) -> JobView:
        """Submits a job. Twice with the same `key` is once: the second call answers the first one's job.

        Raises InvalidJob, with every mistake in the spec.
        """
        tree = dict(spec) if isinstance(spec, Mapping) else spec.model_dump(mode="json")
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        return self._view(JobView, "POST", "/v1/jobs", json=tree, headers=headers)

    def jobs(self) -> list[JobView]:
        """All jobs, as the coordinator orders them."""
        return self._views(JobView, "/v1/jobs")

    def job(self, job_id: str) -> JobView:
        """Raises NotFound."""
        return self._view(JobView, "GET", f"/v1/jobs/{job_id}")

    def cancel(self, job_id: str) -> JobView:
        """Ends the job before its last step. Raises NotFound, and InvalidState where it has ended."""
        return self._view(JobView, "DELETE", f"/v1/jobs/{job_id}")

    def pause(self, job_id: str) -> JobView:
        """Stops the job after the step in progress. Raises NotFound, and InvalidState where it does not run."""
        return self._view(JobView, "POST", f"/v1/jobs/{job_id}/pause")

    def resume(self, job_id: str, changes: Mapping[str, Any] | None = None) -> JobView:
        """Lets a paused job go on, or queues one that failed or was cancelled again, to go on from its last checkpoint;
        the latter with `changes`: fields of its spec, nested as there, that are to be other.

        Raises NotFound, InvalidState where there is nothing to resume: it runs, is about to be cancelled or has
        succeeded, and InvalidJob for changes that are not valid.
        """
        return self._view(JobView, "POST", f"/v1/jobs/{job_id}/resume", json=dict(changes) if changes else None)

    def metrics(self, job_id: str, after_step: int = 0) -> list[StepMetrics]:
        """The job's step metrics, one row a step, from the step after `after_step`."""
        rows = self._views(StepMetrics, f"/v1/jobs/{job_id}/metrics", after=after_step)
        return [row for row in rows if row.step > after_step]

    def samples(self, job_id: str, step: int | None = None, limit: int = 20) -> list[SampleView]:
        """Prompts with their answers, rewards and versions: of `step`, or the newest."""
        return self._views(SampleView, f"/v1/jobs/{job_id}/samples", step=step, limit=limit)

    def ledger(self, job_id: str) -> LedgerView:
        return self._view(LedgerView, "GET", f"/v1/jobs/{job_id}/ledger")

    def wait(self, job_id: str, timeout_s: float) -> JobView:
        """The job once it has ended. Raises Unavailable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(job_id)).state not in ENDED:
            if time.monotonic() > deadline:
                raise errors.Unavailable(
                    f"{job_id} is still {job.state} at step {job.step} of {job.steps} after {timeout_s:g} s.",
                    "wait longer, or look at its events.",
                )
            time.sleep(0.5)
        return job

    def events(self, job_id: str, after: str = "", follow: bool = True) -> Iterator[Event]:
        """The job's events in order, from the one after the id `after`.

        With `follow` it waits for new ones until the job has ended; a broken stream is opened again where it broke.
        """
        while True:
            for event in self._stream(f"/v1/jobs/{job_id}/events", after, follow):
                after = event.id
                yield event
            if not follow or self._all_told(job_id, after):
                return
            time.sleep(0.2)

    # The fleet and the coordinator itself.

    def fleet(self) -> FleetView:
        return self._view(FleetView, "GET", "/v1/fleet")

    def drain(self, member_id: str) -> MemberView:
        """No new work for the member: it finishes what it has and leaves. Raises NotFound."""
        return self._view(MemberView, "POST", f"/v1/fleet/{member_id}/drain")

    def ready(self) -> bool:
        """Whether the coordinator can take jobs: it runs and reaches its Redis. Does not wait."""
        import httpx

        try:
            return self._connection().get("/readyz", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    # How it is asked.

    def _connection(self) -> httpx.Client:
        if self._http is None:
            import httpx

            secret = self._secret()
            try:
                address = urlsplit(self.url)
                if address.scheme not in ("http", "https"):
                    raise ValueError("it does not begin with http:// or https://")
                # Environment proxies are for other hosts: a local stack is always reached directly.
                local = address.hostname in ("localhost", "127.0.0.1", "::1")
                self._http = httpx.Client(
                    base_url=self.url,
                    headers={"Authorization": f"Bearer {secret}"} if secret else {},
                    timeout=self._timeout_s,
                    trust_env=not local,
                )
            except (ValueError, httpx.InvalidURL) as error:
                what = f"the coordinator's address {self.url!r} is not valid: {error}."
                raise errors.MillraceError(what, f"give one like {DEFAULT_URL} with --url or MILLRACE_URL.") from error
        return self._http

    def _secret(self) -> str:
        from millrace.wire.channel import token

        try:
            secret = token() if self._token is None else self._token
            secret.encode("ascii")
        except (OSError, ValueError) as error:
            what = f"the token cannot be read: {error}."
            fix = "let MILLRACE_TOKEN_FILE name a file that holds it, or set MILLRACE_TOKEN instead."
            raise errors.MillraceError(what, fix) from error
        return secret

    def _ask(self, method: str, path: str, *, stream: bool = False, **parts: Any) -> httpx.Response:
        """One call. All of them may be repeated: a submission carries its key, the rest is idempotent by nature. A
        `stream` is not read yet, and is to be closed."""
        import httpx

        connection = self._connection()
        request = connection.build_request(method, path, **parts)
        deadline = time.monotonic() + self._patience_s
        wait_s = 0.1
        while True:
            try:
                response = connection.send(request, stream=stream)
                if response.is_success:
                    return response
                response.read()
                failure = _error_of(response)
                if response.status_code not in PASSING:
                    raise failure
            except httpx.RequestError as error:
                failure = self._unreachable(error, method, path)
            if time.monotonic() + wait_s > deadline:
                raise failure
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)

    def _view(self, kind: type[View], method: str, path: str, **parts: Any) -> View:
        answer = self._ask(method, path, **parts)
        with self._understood():
            return kind.model_validate_json(answer.content)

    def _views(self, kind: type[View], path: str, **query: Any) -> list[View]:
        answer = self._ask("GET", path, params={name: value for name, value in query.items() if value is not None})
        with self._understood():
            return [kind.model_validate(row) for row in answer.json()]

    def _stream(self, path: str, after: str, follow: bool) -> Iterator[Event]:
        """Events of one connection. Returns where the coordinator closed it or went silent."""
        import httpx

        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = httpx.Timeout(self._timeout_s, read=STREAM_TIMEOUT_S)
        answer = self._ask("GET", path, stream=True, headers=headers, params={"follow": follow}, timeout=timeout)
        with contextlib.closing(answer), contextlib.suppress(httpx.TransportError), self._understood():
            yield from _events(_lines(answer.iter_text()))

    def _all_told(self, job_id: str, after: str) -> bool:
        """Whether the job has ended and no event came after the last one seen."""
        if self.job(job_id).state not in ENDED:
            return False
        return not any(True for _ in self._stream(f"/v1/jobs/{job_id}/events", after, follow=False))

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Around what reads an answer. Raises MillraceError where it is not what this client expects."""
        try:
            yield
        except (TypeError, ValueError) as error:
            what = f"{self.url} did not answer as a coordinator of this release does: {error}."
            raise errors.MillraceError(what, "see whether --url or MILLRACE_URL names one.") from error

    def _unreachable(self, error: Exception, method: str, path: str) -> errors.Unavailable:
        return errors.Unavailable(
            f"the coordinator at {self.url} did not answer {method} {path} within {self._patience_s:g} s: {error}.",
            "start one with `millrace up`, or say where it is with --url or MILLRACE_URL.",
        )


def _lines(parts: Iterator[str]) -> Iterator[str]:
    """Lines end with a line feed here, and with nothing else that Python or httpx would take for their end."""
    rest = ""
    for part in parts:
        *lines, rest = (rest + part).split("\n")
        yield from (line.removesuffix("\r") for line in lines)


def _events(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events from the lines of their stream."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data))
            data = []


PASSING = (502, 503, 504)
"""Redis, or what stands before the coordinator, is away for now."""

KINDS: dict[int, type[errors.MillraceError]] = {
    400: errors.InvalidJob,
    401: errors.InvalidState,
    403: errors.InvalidState,
    404: errors.NotFound,
    409: errors.InvalidState,
    413: errors.InvalidJob,
    415: errors.InvalidJob,
    422: errors.InvalidJob,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}


def _error_of(response: httpx.Response) -> errors.MillraceError:
    """The coordinator's problem document as the error that it was."""
    kind = KINDS.get(response.status_code, errors.MillraceError)
    try:
        problem = Problem.model_validate_json(response.content)
    except ValueError:
        told = response.text.strip()[:500] or response.reason_phrase
        return kind(
            f"{response.request.url} answered {response.status_code}: {told}", "see whether it is a coordinator."
        )
    return kind(problem.detail, problem.fix)
