"""Messages to people: POST requests when a job ended or stands still, signed by the Standard Webhooks specification.

Messages are made from what the store holds, beside the job's loop, so that no receiver delays a job, and a coordinator
that takes over continues. A message may so arrive twice; its id is then the same.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlunsplit

import httpx
import structlog
import tenacity

from millrace import __version__, events
from millrace.errors import InvalidState, MillraceError, NotFound, Unavailable
from millrace.ids import JobId
from millrace.rest import JobState
from millrace.rest.webhooks import WebhookJob, WebhookKind, WebhookMessage, WebhookResult
from millrace.spec.schedule import Webhook
from millrace.validation.secrets import secret, secret_of_job
from millrace.validation.urls import check_of_job, parsed, resolved
from millrace.wire.tls import trusted_by_host
from services.coordinator.jobs.placing import JobViews
from services.coordinator.stages.run import Shared
from services.coordinator.state.job import ENDED, JobRecord
from services.coordinator.store import StoreDown

log = structlog.get_logger(__name__)
LOOK_S = 1.0
STALL_LOOK_S = 5.0
ATTEMPT_S = 10.0
"""How long one request may take."""
ATTEMPTS = 6
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 120.0
GIVE_UP_S = 600.0
"""No attempt begins later than this after the first."""
AT_ONCE = 100
"""Messages that are being delivered at a time; others wait in the store."""
OWN = "--webhook"
STANDARD = "whsec_"
"""Prefix of a key in base64; any other key is taken as it is."""


class NotDelivered(MillraceError):
    """The receiver did not take the message, and may take it later."""


@dataclass(frozen=True)
class Hook:
    """A webhook of a job, or that of the coordinator, which may call any address."""

    settings: Webhook
    field: str = OWN

    @property
    def of_job(self) -> bool:
        return self.field != OWN

    def key(self) -> bytes | None:
        """The key that signs; None if messages are not signed. Raises InvalidJob."""
        if self.settings.secret is None:
            return None
        read = secret_of_job if self.of_job else secret
        value = read(self.settings.secret, f"{self.field}.secret").get_secret_value()
        with contextlib.suppress(binascii.Error):
            if value.startswith(STANDARD):
                return base64.b64decode(value.removeprefix(STANDARD), validate=True)
        return value.encode()

    def url(self) -> str:
        """Raises InvalidJob."""
        if self.settings.url.startswith("http"):
            return self.settings.url
        read = secret_of_job if self.of_job else secret
        return read(self.settings.url, f"{self.field}.url").get_secret_value()


def own_webhook(url: str, key: str, stalled_s: float) -> Hook | None:
    """The webhook of a coordinator; None without a URL. Raises InvalidJob, InvalidState."""
    if not url:
        if key:
            raise InvalidState("--webhook-secret: has no --webhook.", "give the URL that is called.")
        return None
    try:
        hook = Hook(Webhook(url=url, secret=key or None, stalled_s=stalled_s))
    except ValueError as error:
        what = "--webhook, --webhook-secret or --stalled-after-s: has a wrong value."
        raise InvalidState(what, "give a URL or env:NAME or file:/path, the last two for the secret too.") from error
    parsed(hook.url(), OWN, url)
    hook.key()
    return hook


def signature(key: bytes, message_id: str, time_s: int, body: bytes) -> str:
    """The header `webhook-signature`: HMAC-SHA256 of `id.time.body`."""
    signed = b".".join([message_id.encode(), str(time_s).encode(), body])
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


class Webhooks:
    """Sends the messages of all jobs until cancelled."""

    def __init__(self, shared: Shared, views: JobViews, own: Hook | None) -> None:
        self._events, self._views, self._own = shared.events, views, own
        self._store, self._prometheus = shared.store, shared.prometheus
        self._sending: dict[asyncio.Task[None], float] = {}
        """Messages that are being delivered. The value is the Unix time at which the job ended that the message is
        about; ∞ for others."""
        self._until: float | None = None
        """Ends until this Unix time were looked at."""
        self._saved = 0.0
        self._steps: dict[JobId, tuple[int, float]] = {}
        """Step of each running job, and the monotonic time at which that step was first seen."""
        self._looked_at = 0.0

    async def run(self) -> None:
        """Looks for news of jobs, and starts to send the messages about them."""
        try:
            while True:
                async with self._store.connection.outlasted():
                    await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)

    async def test(self, job: JobRecord | None) -> list[WebhookResult]:
        """Sends a test message once to each webhook of the job, or to that of the coordinator. Raises InvalidState
        if there is none."""
        hooks = list(_of(job)) if job is not None else [each for each in (self._own,) if each is not None]
        if not hooks:
            whose = "the coordinator has none" if job is None else f"{job.id} has none"
            fix = "start it with --webhook URL." if job is None else "name some in `webhooks` of its spec."
            raise InvalidState(f"webhook: {whose}.", fix)
        text = "A test of this webhook." if job is None else f"A test of the webhooks of {job.name} ({job.id})."
        message = _message(job, "test", f"test.{time.time_ns()}", text)
        return list(await asyncio.gather(*(_tried(hook, message) for hook in hooks)))

    async def _look(self) -> None:
        if self._until is None:
            self._until = await self._store.index.reported_until() or time.time()
        now = time.monotonic()
        await self._ends()
        if now - self._looked_at >= STALL_LOOK_S:
            self._looked_at = now
            await self._stalls(now)

    async def _ends(self) -> None:
        """Begins the messages of jobs that have ended since, and notes until when all were delivered or given up."""
        assert self._until is not None
        if room := max(0, AT_ONCE - len(self._sending)):
            for job_id, ended_s in await self._store.index.ended_after(self._until, room):
                with contextlib.suppress(NotFound):  # it was deleted
                    job = await self._store.jobs.get(job_id)
                    if job.state in ENDED:
                        self._begin(job, _kind(job.state), f"{job.id}.{ended_s:.6f}", _end_text(job), ended_s)
                self._until = ended_s
        earliest = min([*self._sending.values(), math.inf])
        done = self._until if math.isinf(earliest) else math.nextafter(earliest, 0.0)
        if done != self._saved:
            await self._store.index.set_reported_until(done)
            self._saved = done

    async def _stalls(self, now: float) -> None:
        ids = [
            each for s in (JobState.STARTING, JobState.RUNNING) for each in await self._store.index.in_state(s, AT_ONCE)
        ]
        jobs = {job.id: job for job in await self._store.index.without_specs(ids)}
        self._steps = {i: (job.step, self._since(job, now)) for i, job in jobs.items()}
        for job_id, (step, since) in self._steps.items():
            hooks = [h for h in self._hooks(await self._store.jobs.get(job_id)) if "stalled" in h.settings.when]
            due = [hook for hook in hooks if now - since >= hook.settings.stalled_s]
            if not due or len(self._sending) + len(due) > AT_ONCE:
                continue
            records, job = self._store.records(job_id), await self._store.jobs.get(job_id)
            for hook in due:
                note = f"stalled:{hook.field}"
                if await records.note(note) != step:
                    await records.set_note(note, step)
                    self._begin(
                        job, "stalled", f"{job_id}.stalled.{step}", self._stall_text(job, now - since), hook=hook
                    )

    def _since(self, job: JobRecord, now: float) -> float:
        step, since = self._steps.get(job.id, (job.step, now))
        return since if step == job.step else now

    def _stall_text(self, job: JobRecord, seconds: float) -> str:
        waiting = self._views.waits_for(job)
        why = f"it waits: {waiting.message}" if waiting is not None else "`millrace diagnose` says what is slow"
        return f"{job.name} ({job.id}) has trained no step for {seconds:.0f} s after step {job.step}; {why}."

    def _hooks(self, job: JobRecord) -> Iterator[Hook]:
        yield from [self._own] if self._own is not None else []
        yield from _of(job)

    def _begin(
        self,
        job: JobRecord,
        kind: WebhookKind,
        message_id: str,
        text: str,
        ended_s: float = math.inf,
        hook: Hook | None = None,
    ) -> None:
        """Delivers a message in tasks of their own, to one webhook or to all that want it."""
        wanted = [hook] if hook is not None else [h for h in self._hooks(job) if kind in h.settings.when]
        for each in wanted:
            message = _message(job, kind, f"{message_id}.{each.field}", text)
            task = asyncio.create_task(self._deliver(job.id, each, message))
            self._sending[task] = ended_s
            task.add_done_callback(lambda done: self._sending.pop(done, None))

    async def _deliver(self, job_id: JobId, hook: Hook, message: WebhookMessage) -> None:
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS) | tenacity.stop_after_delay(GIVE_UP_S),
            wait=tenacity.wait_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
            retry=tenacity.retry_if_exception_type(NotDelivered),
        )
        try:
            await retrying(_send, hook, message)
            self._prometheus.called_webhook(delivered=True)
            log.info("a webhook was called", job=job_id, webhook=hook.field, kind=message.kind)
        except (MillraceError, tenacity.RetryError) as error:
            last = error.last_attempt.exception() if isinstance(error, tenacity.RetryError) else error
            self._prometheus.called_webhook(delivered=False)
            text = f"{hook.field}: the message {message.kind} was not delivered: {last}"
            log.warning("a webhook failed", job=job_id, webhook=hook.field, kind=message.kind, error=str(last))
            if hook.of_job:
                with contextlib.suppress(StoreDown):
                    failed = events.WebhookFailed(webhook=hook.field, message=message.kind)
                    await self._events.add(job_id, failed, text)


async def _tried(hook: Hook, message: WebhookMessage) -> WebhookResult:
    try:
        await _send(hook, message)
    except MillraceError as error:
        return WebhookResult(field=hook.field, delivered=False, reason=str(error))
    return WebhookResult(field=hook.field, delivered=True, reason="")


async def _send(hook: Hook, message: WebhookMessage) -> None:
    """One attempt. Nothing of the answer but its status is read. Raises NotDelivered; InvalidJob and Unavailable if
    another attempt is of no use."""
    url, body, now = hook.url(), message.model_dump_json().encode(), int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": f"millrace/{__version__}",
        "webhook-id": message.id,
        "webhook-timestamp": str(now),
    }
    if (key := hook.key()) is not None:
        headers["webhook-signature"] = signature(key, message.id, now, body)
    extensions = {}
    if hook.of_job:
        field = f"{hook.field}.url"
        parts = check_of_job(url, field, hook.settings.url)
        address = await resolved(parts, field, hook.settings.url)
        headers["host"] = parts.netloc
        extensions = {"sni_hostname": str(parts.hostname)}
        at = f"[{address}]" if ":" in address else address
        url = urlunsplit(parts._replace(netloc=at if parts.port is None else f"{at}:{parts.port}", fragment=""))
    try:
        # Proxies of the environment are for the coordinator's own webhook: a proxy looks up names by itself.
        async with (
            asyncio.timeout(ATTEMPT_S),
            httpx.AsyncClient(verify=trusted_by_host(url), trust_env=not hook.of_job) as client,
            client.stream("POST", url, content=body, headers=headers, extensions=extensions) as answer,
        ):
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
        why = f"no answer within {ATTEMPT_S:g} s" if isinstance(error, TimeoutError) else type(error).__name__
        raise NotDelivered(
            f"the receiver did not answer ({why}).", "see whether it runs and can be reached."
        ) from error
    if status >= 500 or status in (408, 429):
        raise NotDelivered(f"the receiver answered with status {status}.", "see what its log says.")
    if status >= 300:
        what = f"the receiver refused it with status {status}."
        raise Unavailable(what, "correct the URL or the secret; redirects are not followed.")


def _of(job: JobRecord) -> Iterator[Hook]:
    """The job's own. Its spec is not validated as a whole, as it may be of another release."""
    for number, tree in enumerate(json.loads(job.spec_json).get("webhooks", [])):
        try:
            yield Hook(Webhook.model_validate(tree), f"webhooks.{number}")
        except ValueError as error:
            log.warning("a webhook cannot be read", job=job.id, webhook=number, error=str(error))


def _kind(state: JobState) -> WebhookKind:
    if state is JobState.FAILED:
        return "failed"
    return "succeeded" if state is JobState.SUCCEEDED else "cancelled"


def _end_text(job: JobRecord) -> str:
    how = "was cancelled" if job.state is JobState.CANCELLED else job.state
    text = f"{job.name} ({job.id}) {how} after step {job.step}"
    return " ".join(f"{text}: {job.failure}".split()) if job.failure else f"{text}."


def _message(job: JobRecord | None, kind: WebhookKind, message_id: str, text: str) -> WebhookMessage:
    about = None
    if job is not None:
        about = WebhookJob(
            id=job.id,
            name=job.name,
            state=job.state,
            step=job.step,
            steps=job.steps or 0,
            user=job.user,
            failure=job.failure if job.state is JobState.FAILED else None,
        )
    return WebhookMessage(id=message_id, kind=kind, time_s=time.time(), text=text, job=about)
