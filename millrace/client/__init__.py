"""The coordinator's REST API from Python.

    client = Client()                      # MILLRACE_URL, or the local stack's http://127.0.0.1:7700
    job = client.submit(load("job.yaml"))
    for event in client.events(job.id):
        print(event.message)

Every call has a deadline. While the coordinator does not answer, or does not reach its Redis, a call is repeated for
`patience_s`, so that a restart in the middle of a job goes unnoticed. Errors are `MillraceError`s with a fix.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from millrace import errors
from millrace.client.connection import DEFAULT_URL as DEFAULT_URL
from millrace.client.connection import Connection
from millrace.events import Event
from millrace.rest import (
    ENDED,
    DeletedView,
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
    SampleView,
    SeriesView,
    SpecView,
    StepMetrics,
)
from millrace.rest.diagnosis import DiagnosisView
from millrace.rest.timeline import TimelineView
from millrace.rest.users import AuditView, NewToken, Role, UserView
from millrace.rest.webhooks import WebhookResult

if TYPE_CHECKING:
    from millrace.spec import JobSpec

PAGE_JOBS = 500
"""Most jobs that one request lists."""


class Client(Connection):
    """Calls to one coordinator.

    `url` is MILLRACE_URL unless given, or else that of the local stack. `token` is the secret that the services share,
    MILLRACE_TOKEN unless given. MILLRACE_TLS_* name the files of TLS for an https
    address. `timeout_s` limits one request; `patience_s` limits how long a call is repeated.
    """

    # Jobs.

    def submit(self, spec: JobSpec | Mapping[str, Any], key: str | None = None) -> JobView:
        """Submits a job. A second call with the same `key` submits nothing: it returns the job of the first call.

        Of a JobSpec the fields that differ from their defaults are sent, which a coordinator of an earlier release
        reads too. Raises InvalidJob, with every mistake in the spec.
        """
        tree = dict(spec) if isinstance(spec, Mapping) else json.loads(spec.without_defaults())
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        return self._view(JobView, "POST", "/v1/jobs", json=tree, headers=headers)

    def jobs(
        self, state: JobState | None = None, limit: int | None = None, *, tag: str | None = None
    ) -> list[JobSummary]:
        """The jobs, or those in `state` and with `tag`, without their specs, the newest first. All of them, or at most
        `limit`."""
        found: list[JobSummary] = []
        query = _given(state=state or None, tag=tag or None)
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
        tree = _given(tags=None if tags is None else list(tags), notes=notes)
        return self._view(JobView, "PATCH", f"/v1/jobs/{job_id}", json=tree)

    def cancel(self, job_id: str) -> JobView:
        """Cancels the job. Raises NotFound, and InvalidState if the job has ended."""
        return self._view(JobView, "DELETE", f"/v1/jobs/{job_id}")

    def delete(self, job_id: str, *, checkpoints: bool = False) -> DeletedView:
        """Deletes a job that has ended, with `checkpoints` also these. Raises NotFound, and InvalidState for a job that
        has not ended or whose checkpoints cannot be deleted."""
        return self._view(DeletedView, "POST", f"/v1/jobs/{job_id}/delete", params={"checkpoints": checkpoints})

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

    def image(self, job_id: str, prompt_id: str, number: int, sha256: str = "") -> bytes:
        """The file of one image of a prompt, counted from 1; with `sha256` it has that hash. Raises NotFound if the
        job's data does not have it any more, or if it is neither PNG, JPEG, WebP nor GIF."""
        path = f"/v1/jobs/{job_id}/prompts/{quote(prompt_id, safe='')}/images/{number}"
        return bytes(self._ask("GET", path, params={"sha256": sha256} if sha256 else {}).content)

    def ledger(self, job_id: str) -> LedgerView:
        """How many prompts of the job are in which state. Raises NotFound."""
        return self._view(LedgerView, "GET", f"/v1/jobs/{job_id}/ledger")

    def timeline(self, job_id: str, from_step: int | None = None, to_step: int | None = None) -> TimelineView:
        """What every service did from `from_step` to `to_step`; the last trained step by default. Raises NotFound."""
        asked = _given(from_step=from_step, to_step=to_step)
        return self._view(TimelineView, "GET", f"/v1/jobs/{job_id}/timeline", params=asked)

    def diagnosis(self, job_id: str, from_step: int | None = None, to_step: int | None = None) -> DiagnosisView:
        """What slows the job down from `from_step` to `to_step`; in the last ten steps by default. Raises NotFound."""
        asked = _given(from_step=from_step, to_step=to_step)
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
        NotFound, and Unavailable if the member does not answer."""
        return self._view(LogView, "GET", f"/v1/fleet/{member_id}/log?lines={lines}")

    def test_webhooks(self, job_id: str | None = None) -> list[WebhookResult]:
        """Sends a test message to each webhook of a job, or to that of the coordinator. Raises NotFound, and
        InvalidState if there is none."""
        path = "/v1/webhooks/test" if job_id is None else f"/v1/jobs/{job_id}/webhooks/test"
        answer = self._ask("POST", path)
        with self._parsing():
            return [WebhookResult.model_validate(row) for row in answer.json()]

    # Users, for admins.

    def users(self) -> list[UserView]:
        """All users, with the ids of their tokens."""
        return self._views(UserView, "/v1/users")

    def add_user(self, name: str, role: Role = Role.SUBMIT) -> NewToken:
        """Adds a user; returns its first token, which is shown only once. Raises InvalidState for a name that is
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

    def _is_complete(self, job_id: str, after: str) -> bool:
        """Whether the job has ended and has no event after the one with the id `after`."""
        if self.job(job_id).state not in ENDED:
            return False
        return not any(True for _ in self._stream(f"/v1/jobs/{job_id}/events", after, follow=False))


def _given(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
