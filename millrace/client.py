"""The coordinator's REST API from Python.

    client = Client()                      # MILLRACE_URL, or the local stack's http://127.0.0.1:7700
    job = client.submit(load("job.yaml"))
    for event in client.events(job.id):
        print(event.message)

Every call has a deadline. While the coordinator does not answer, or does not reach its Redis, a call is repeated for
`patience_s`, so that a restart in the middle of a job goes unnoticed. Errors are `MillraceError`s with a fix.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from millrace import errors
from millrace.events import Event
from millrace.rest import (
    ENDED,
    FleetView,
    HistogramView,
    JobPage,
    JobState,
    JobSummary,
    JobView,
    LedgerView,
    LogView,
    MemberView,
    MetricView,
    Problem,
    SampleView,
    SeriesView,
    SpecView,
    StepMetrics,
)
from millrace.rest.diagnosis import DiagnosisView
from millrace.rest.timeline import TimelineView
from millrace.rest.users import AuditView, NewToken, Role, UserView

if TYPE_CHECKING:
    import httpx
    from pydantic import BaseModel

    from millrace.spec import JobSpec

    View = TypeVar("View", bound=BaseModel)

DEFAULT_URL = "http://127.0.0.1:7700"
TIMEOUT_S = 30.0
PAGE_JOBS = 500
"""Most jobs that one request lists."""
STREAM_TIMEOUT_S = 60.0
"""Seconds without a line after which an event stream is opened again; the coordinator sends comments more often."""


def default_url() -> str:
    """Of the local stack."""
    return DEFAULT_URL if not os.environ.get("MILLRACE_TLS_CA") else DEFAULT_URL.replace("http:", "https:")


class Client:
    """Calls to one coordinator.

    `url` is MILLRACE_URL unless given, or else that of the local stack. `token` is the secret that the services share,
    MILLRACE_TOKEN unless given. MILLRACE_TLS_* name the files of TLS for an https
    address. `timeout_s` limits one request; `patience_s` limits how long a call is repeated.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = 10.0,
    ) -> None:
        self.url = (url or os.environ.get("MILLRACE_URL") or default_url()).rstrip("/")
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
        """Submits a job. A second call with the same `key` submits nothing: it returns the job of the first call.

        Raises InvalidJob, with every mistake in the spec.
        """
        tree = dict(spec) if isinstance(spec, Mapping) else spec.model_dump(mode="json")
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        return self._view(JobView, "POST", "/v1/jobs", json=tree, headers=headers)

    def jobs(
        self, state: JobState | None = None, limit: int | None = None, *, tag: str | None = None
    ) -> list[JobSummary]:
        """The jobs, or those in `state` and with `tag`, without their specs, the newest first. All of them, or at most
        `limit`."""
        found: list[JobSummary] = []
        query: dict[str, Any] = {name: value for name, value in (("state", state), ("tag", tag)) if value}
        while limit is None or len(found) < limit:
            most = PAGE_JOBS if limit is None else min(PAGE_JOBS, limit - len(found))
            page = self._view(JobPage, "GET", "/v1/jobs", params={**query, "limit": most})
            found += page.jobs
            if page.next is None:
                break
            query["cursor"] = page.next
        return found

    def job(self, job_id: str) -> JobView:
        """One job. Raises NotFound."""
        return self._view(JobView, "GET", f"/v1/jobs/{job_id}")

    def note(self, job_id: str, *, tags: Sequence[str] | None = None, notes: str | None = None) -> JobView:
        """Replaces the job's tags, its notes, or both. Raises NotFound, and InvalidJob for a tag that is not valid."""
        tree = {"tags": None if tags is None else list(tags), "notes": notes}
        given = {name: value for name, value in tree.items() if value is not None}
        return self._view(JobView, "PATCH", f"/v1/jobs/{job_id}", json=given)

    def cancel(self, job_id: str) -> JobView:
        """Cancels the job. Raises NotFound, and InvalidState if the job has ended."""
        return self._view(JobView, "DELETE", f"/v1/jobs/{job_id}")

    def pause(self, job_id: str) -> JobView:
        """Pauses the job after the step in progress. Raises NotFound, and InvalidState if the job does not run."""
        return self._view(JobView, "POST", f"/v1/jobs/{job_id}/pause")

    def resume(self, job_id: str, changes: Mapping[str, Any] | None = None) -> JobView:
        """Continues a paused job. A job that failed or was cancelled is queued again and continues from its last
        checkpoint, with `changes`: new values of fields of its spec, nested as there.

        Raises NotFound; InvalidState if there is nothing to resume: the job runs, is about to be cancelled or has
        succeeded; InvalidJob if the changes are not valid.
        """
        return self._view(JobView, "POST", f"/v1/jobs/{job_id}/resume", json=dict(changes) if changes else None)

    def metrics(self, job_id: str, after_step: int = 0) -> list[StepMetrics]:
        """The job's step metrics, one row per step, from the step after `after_step`. Raises NotFound."""
        rows = self._views(StepMetrics, f"/v1/jobs/{job_id}/metrics", after=after_step)
        return [row for row in rows if row.step > after_step]

    def metric_keys(self, job_id: str) -> list[MetricView]:
        """Every metric that a step of the job has. Raises NotFound."""
        return self._views(MetricView, f"/v1/jobs/{job_id}/metrics/keys")

    def series(self, job_id: str, keys: Sequence[str], last: int, points: int = 500) -> SeriesView:
        """Curves of at most 100 metrics up to step `last`, each with at most `points` points. Raises NotFound."""
        asked = {"keys": list(keys), "last": last, "points": points}
        return self._view(SeriesView, "GET", f"/v1/jobs/{job_id}/series", params=asked)

    def histograms(self, job_id: str, last: int) -> list[HistogramView]:
        """How quantities were distributed in 100 of the newest steps up to step `last`. Raises NotFound."""
        return self._views(HistogramView, f"/v1/jobs/{job_id}/histograms", last=last)

    def spec(self, job_id: str) -> SpecView:
        """The job's spec, and the part of it that differs from the defaults. Raises NotFound."""
        return self._view(SpecView, "GET", f"/v1/jobs/{job_id}/spec")

    def samples(self, job_id: str, step: int | None = None, limit: int = 20) -> list[SampleView]:
        """At most `limit` prompts with their answers, rewards and versions: those of `step`, or the newest. Raises
        NotFound."""
        return self._views(SampleView, f"/v1/jobs/{job_id}/samples", step=step, limit=limit)

    def ledger(self, job_id: str) -> LedgerView:
        """How many prompts of the job are in which state. Raises NotFound."""
        return self._view(LedgerView, "GET", f"/v1/jobs/{job_id}/ledger")

    def timeline(self, job_id: str, from_step: int | None = None, to_step: int | None = None) -> TimelineView:
        """What every service did from `from_step` to `to_step`; the last trained step by default. Raises NotFound."""
        asked = {name: step for name, step in (("from_step", from_step), ("to_step", to_step)) if step is not None}
        return self._view(TimelineView, "GET", f"/v1/jobs/{job_id}/timeline", params=asked)

    def diagnosis(self, job_id: str, from_step: int | None = None, to_step: int | None = None) -> DiagnosisView:
        """What slows the job down from `from_step` to `to_step`; in the last ten steps by default. Raises NotFound."""
        asked = {name: step for name, step in (("from_step", from_step), ("to_step", to_step)) if step is not None}
        return self._view(DiagnosisView, "GET", f"/v1/jobs/{job_id}/diagnosis", params=asked)

    def wait(self, job_id: str, timeout_s: float) -> JobView:
        """Waits until the job has ended, and returns it. Raises NotFound, and Unavailable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(job_id)).state not in ENDED:
            if time.monotonic() > deadline:
                raise errors.Unavailable(
                    f"{job_id} is still {job.state} at step {job.step} of {job.steps} after {timeout_s:g} s.",
                    f"wait longer, or see what it does: `millrace events {job_id}`.",
                )
            time.sleep(0.5)
        return job

    def events(self, job_id: str, after: str = "", follow: bool = True) -> Iterator[Event]:
        """Yields the job's events in order, from the one after the id `after`. millrace/events declares them.

        With `follow` it waits for new events until the job has ended; a broken stream is opened again where it broke.
        Raises NotFound.
        """
        while True:
            for event in self._stream(f"/v1/jobs/{job_id}/events", after, follow):
                after = event.id
                yield event
            if not follow or self._is_complete(job_id, after):
                return
            time.sleep(0.2)

    # The fleet and the coordinator itself.

    def fleet(self) -> FleetView:
        """All trainers and replicas, and those lost recently."""
        return self._view(FleetView, "GET", "/v1/fleet")

    def drain(self, member_id: str) -> MemberView:
        """Gives the member no new work: it finishes what it has and leaves. Raises NotFound."""
        return self._view(MemberView, "POST", f"/v1/fleet/{member_id}/drain")

    def log(self, member_id: str, lines: int = 200) -> LogView:
        """The newest lines, at most 200, that a member has logged; `coordinator` names the coordinator itself. Raises
        NotFound, and Unavailable where the member does not answer."""
        return self._view(LogView, "GET", f"/v1/fleet/{member_id}/log?lines={lines}")

    # Users, for admins.

    def users(self) -> list[UserView]:
        """All users, with the ids of their tokens."""
        return self._views(UserView, "/v1/users")

    def add_user(self, name: str, role: Role = Role.SUBMIT) -> NewToken:
        """Adds a user; returns its first token, which is told only here. Raises InvalidState for a name that is
        taken."""
        return self._view(NewToken, "POST", "/v1/users", json={"name": name, "role": role})

    def remove_user(self, name: str) -> UserView:
        """Removes a user; its tokens end at once, its jobs go on. Raises NotFound."""
        return self._view(UserView, "DELETE", f"/v1/users/{quote(name, safe='')}")

    def new_token(self, name: str, role: Role | None = None, *, replace: bool = False) -> NewToken:
        """Makes another token of a user, with the user's role or a lower one. `replace`: the user's other tokens end.
        Raises NotFound, and InvalidState for a role that is higher than the user's."""
        asked = {"role": role, "replace": replace}
        return self._view(NewToken, "POST", f"/v1/users/{quote(name, safe='')}/tokens", json=asked)

    def audit(self, limit: int = 100) -> list[AuditView]:
        """The newest requests that changed something or were not allowed, the last one first."""
        return self._views(AuditView, "/v1/audit", limit=limit)

    def ready(self) -> bool:
        """Whether the coordinator can take jobs: it runs and reaches its Redis. Asks only once."""
        import httpx

        try:
            return self._connection().get("/readyz", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    # Requests.

    def _connection(self) -> httpx.Client:
        if self._http is None:
            import httpx

            from millrace.wire.reach import may_take_proxy
            from millrace.wire.tls import verifying

            secret = self._secret()
            try:
                address = urlsplit(self.url)
                if address.scheme not in ("http", "https"):
                    raise ValueError("does not begin with http:// or https://")
                self._http = httpx.Client(
                    base_url=self.url,
                    headers={"Authorization": f"Bearer {secret}"} if secret else {},
                    timeout=self._timeout_s,
                    trust_env=may_take_proxy(self.url),
                    verify=verifying(),
                )
            except (ValueError, httpx.InvalidURL) as error:
                fix = f"give an address like {DEFAULT_URL} with --url or MILLRACE_URL."
                wrong = errors.wrong_value("MILLRACE_URL", self.url, str(error), fix)
                raise errors.MillraceError(wrong.what, wrong.fix) from error
        return self._http

    def _secret(self) -> str:
        from millrace.wire.channel import sendable, token

        return token() if self._token is None else sendable(self._token)

    def _ask(self, method: str, path: str, *, stream: bool = False, **parts: Any) -> httpx.Response:
        """One call, repeated while the coordinator is not available. Every call may be repeated: a submission carries
        its key, all others are idempotent. With `stream` the body of the answer is not read yet, and the caller closes
        the answer. Raises MillraceError."""
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
                failure = self._unauthorized() if response.status_code == 401 else _error_of(response)
                if response.status_code not in TEMPORARY:
                    raise failure
            except httpx.RequestError as error:
                failure = self._unreachable(error, method, path)
            if time.monotonic() + wait_s > deadline:
                raise failure
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)

    def _unauthorized(self) -> errors.InvalidState:
        """The error where the coordinator refuses the token."""
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

    def _is_complete(self, job_id: str, after: str) -> bool:
        """Whether the job has ended and has no event after the one with the id `after`."""
        if self.job(job_id).state not in ENDED:
            return False
        return not any(True for _ in self._stream(f"/v1/jobs/{job_id}/events", after, follow=False))

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        """Raises MillraceError if the code inside finds that an answer is not what this client expects."""
        try:
            yield
        except (TypeError, ValueError) as error:
            what = f"{self.url} did not answer as a coordinator of this release does."
            fix = "check that --url or MILLRACE_URL is the address of a coordinator, and compare `millrace --version`."
            raise errors.MillraceError(what, fix) from error

    def _unreachable(self, error: Exception, method: str, path: str) -> errors.Unavailable:
        from millrace.wire.tls.faults import diagnose

        with contextlib.suppress(ValueError):  # of a port that is none
            address = urlsplit(self.url)
            port = address.port or (443 if address.scheme == "https" else 80)
            if (fault := diagnose(address.hostname or "", port, encrypted=address.scheme == "https")) is not None:
                return fault
        return errors.Unavailable(
            f"the coordinator at {self.url} did not answer {method} {path} within {self._patience_s:g} s: {error}.",
            "start one with `millrace up`, or give its address with --url or MILLRACE_URL.",
        )


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


TEMPORARY = (429, 502, 503, 504)
"""Statuses while the coordinator has too much to do, or Redis or a proxy is not available."""

ERRORS: dict[int, type[errors.MillraceError]] = {
    400: errors.InvalidJob,
    403: errors.InvalidState,
    404: errors.NotFound,
    409: errors.InvalidState,
    413: errors.InvalidJob,
    415: errors.InvalidJob,
    422: errors.InvalidJob,
    429: errors.Unavailable,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}


def _error_of(response: httpx.Response) -> errors.MillraceError:
    """The error that the coordinator's problem document describes."""
    kind = ERRORS.get(response.status_code, errors.MillraceError)
    try:
        problem = Problem.model_validate_json(response.content)
    except ValueError:
        text = response.text.strip()[:500] or response.reason_phrase
        what = f"{response.request.url} answered {response.status_code}: {text}"
        return kind(what, "check that --url or MILLRACE_URL is the address of a coordinator.")
    if kind is errors.InvalidJob:
        return errors.InvalidJob(problem.detail, problem.fix, problem.mistakes)
    return kind(problem.detail, problem.fix)
