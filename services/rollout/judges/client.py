"""Asks a judge, behind a URL or in a pool of the job: a bounded number of requests at a time, each repeated for
as long as the judge may be down.

A judge is down from the first request that it does not answer until it answers one. Nobody else has to wait for that:
the coroutine that asks does.
"""

import asyncio
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, Protocol

import httpx
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from millrace.spec.pool import Judge, JudgeTerm
from millrace.validation.secrets import secret_of_job
from millrace.wire.channel import token
from millrace.wire.reach import may_take_proxy
from millrace.wire.tls import scheme, trusted_by_host, verifying
from services.rollout.pools.client import PoolClient, PoolMembers

FAILED_S = 10.0
"""How long a replica that failed is asked only if all others have failed too."""


class JudgePlace(Protocol):
    """The address and headers of requests to a judge."""

    model: str
    """The model that they name."""
    key: str
    """The key that comes with them; empty: none."""
    may_take_proxy: bool
    """Whether they go through a proxy that the environment names."""
    verify: ssl.SSLContext
    """How the certificate of a place with https is checked."""

    def taken(self) -> AbstractAsyncContextManager[str]:
        """The base URL for one request, for as long as that lasts. Waits while nobody could answer."""

    def failed(self, url: str) -> None:
        """A request to this base URL was not answered."""


class JudgeUrl:
    """A judge behind a URL. See `JudgePlace`."""

    def __init__(self, judge: Judge, field: str) -> None:
        """`field`: path of the judge in the job spec. Raises InvalidJob if its key cannot be read here."""
        self._url = (judge.url or "").rstrip("/")
        self.model = judge.model or ""
        key = judge.api_key
        self.key = secret_of_job(key, f"{field}.api_key").get_secret_value() if key is not None else ""
        self.may_take_proxy = may_take_proxy(self._url)
        self.verify = trusted_by_host(self._url)

    def taken(self) -> AbstractAsyncContextManager[str]:
        return nullcontext(self._url)

    def failed(self, url: str) -> None:
        """See `JudgePlace`."""


class JudgePool:
    """A judge in a pool: requests are spread over its replicas. See `JudgePlace`."""

    def __init__(self, members: PoolMembers) -> None:
        self._members = members
        self._in_flight: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self.model = members.pool
        self.key = token()
        self.may_take_proxy = False
        self.verify = verifying(f"{scheme()}://")

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[str]:
        """See `JudgePlace`. The replica has the fewest requests of this caller."""
        urls = [f"{scheme()}://{member.endpoint}/v1" for member in await self._members.ready()]
        url = min(urls, key=lambda url: (self._has_failed(url), self._in_flight[url], random.random()))
        self._in_flight[url] += 1
        try:
            yield url
        finally:
            self._in_flight[url] -= 1

    def failed(self, url: str) -> None:
        self._failed_at[url] = time.monotonic()
        self._members.doubt()

    def _has_failed(self, url: str) -> bool:
        return time.monotonic() - self._failed_at.get(url, -FAILED_S) < FAILED_S


def place_of(term: JudgeTerm, pools: Mapping[str, PoolClient]) -> JudgePlace:
    """The place of a judge; `pools` are those of the job, by name. Raises InvalidJob if its key cannot be read here."""
    pool = term.judge.pool
    return JudgeUrl(term.judge, term.field) if pool is None else JudgePool(pools[pool].members)


log = structlog.get_logger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LARGEST_ANSWER = 16 << 20
"""Bytes of an answer of the endpoint."""
BUSY = frozenset({408, 409, 425, 429})
"""Statuses after which the same request may succeed, besides those from 500 on."""
LONGEST_SHOWN = 300
Message = Mapping[str, str]


class JudgeRefused(Exception):
    """The judge refuses the request: repeating it would not help."""


class JudgeDown(Exception):
    """The judge has not answered for `deadline_s`."""


class _NotNow(Exception):
    """The judge does not answer at the moment. `after_s`: when it wants to be asked again."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


@dataclass(frozen=True)
class Outage:
    """A judge is down."""

    since: float
    """time.monotonic() of the first request that it did not answer."""
    why: str

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class JudgeClient:
    """One judge of one job. Use it in one event loop; `close` ends its connections."""

    def __init__(self, judge: Judge, name: str, place: JudgePlace) -> None:
        """`name`: of the part of the reward, for messages."""
        self.judge = judge
        self._place = place
        self.name = name
        self.outage: Outage | None = None
        """Set while the judge is down."""
        self.waiting = 0
        """Requests that are asked or wait."""
        self.asked = {"answered": 0, "repeated": 0, "refused": 0, "given_up": 0}
        """How often requests ended in which way."""
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {place.key}"} if place.key else {},
            timeout=judge.timeout_s,
            limits=httpx.Limits(max_connections=judge.max_concurrent),
            trust_env=place.may_take_proxy,
            verify=place.verify,
        )
        self._slots = asyncio.Semaphore(judge.max_concurrent)

    async def ask(self, messages: Sequence[Message]) -> str:
        """The judge's reply. Raises JudgeDown, JudgeRefused."""
        arrived = time.monotonic()
        self.waiting += 1
        try:
            async with self._slots:
                self._give_up_after(arrived)
                return await self._patiently(messages, time.monotonic())
        finally:
            self.waiting -= 1

    def _give_up_after(self, arrived: float) -> None:
        """Ends what waited in line for as long as others waited for an answer."""
        if self.outage is not None and self._is_over(max(arrived, self.outage.since)):
            self._give_up(self.outage.why)

    def _is_over(self, since: float) -> bool:
        return time.monotonic() - since >= self.judge.deadline_s

    def _give_up(self, why: str) -> NoReturn:
        self.asked["given_up"] += 1
        raise JudgeDown(f"did not answer for {self.judge.deadline_s:g} s: {why}")

    async def _patiently(self, messages: Sequence[Message], began: float) -> str:
        """Repeats a request until it is answered, refused, or the deadline is over."""
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(_NotNow),
            stop=lambda _: self._is_over(began),
            wait=lambda state: min(_pause_s(state), max(0.0, began + self.judge.deadline_s - time.monotonic())),
            before_sleep=self._repeats,
            reraise=True,
        )
        try:
            reply: str = await attempts(self._ask_once, messages)
        except _NotNow as error:
            self._give_up(str(error))
        except JudgeRefused:
            self.asked["refused"] += 1
            raise
        self.asked["answered"] += 1
        return reply

    async def _repeats(self, state: RetryCallState) -> None:
        self.asked["repeated"] += 1

    async def _ask_once(self, messages: Sequence[Message]) -> str:
        try:
            reply = await self._placed(messages)
        except _NotNow as error:
            if self.outage is None:
                self.outage = Outage(time.monotonic(), str(error))
                log.warning("a judge does not answer; scores wait", judge=self.name, reason=str(error))
            raise
        except JudgeRefused:
            self._is_back()
            raise
        self._is_back()
        return reply

    def _is_back(self) -> None:
        if self.outage is not None:
            log.info("the judge answers again", judge=self.name, seconds=round(self.outage.seconds, 1))
            self.outage = None

    async def _placed(self, messages: Sequence[Message]) -> str:
        async with self._place.taken() as url:
            try:
                return await self._exchange(f"{url}/chat/completions", messages)
            except _NotNow:
                self._place.failed(url)
                raise

    async def _exchange(self, url: str, messages: Sequence[Message]) -> str:
        body = {**self.judge.options, "model": self._place.model, "messages": list(messages), "stream": False}
        try:
            async with asyncio.timeout(self.judge.timeout_s), self._http.stream("POST", url, json=body) as response:
                text = await _read(response)
        except TimeoutError as error:
            raise _NotNow(f"no answer within {self.judge.timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise _NotNow(str(error) or type(error).__name__) from error
        if response.status_code in BUSY or response.status_code >= 500:
            raise _NotNow(f"status {response.status_code}: {_short(text)}", _retry_after_s(response))
        if response.status_code != 200:
            raise JudgeRefused(f"refused the request with status {response.status_code}: {_short(text)}")
        return _content(text)

    async def close(self) -> None:
        await self._http.aclose()


async def _read(response: httpx.Response) -> bytes:
    held = bytearray()
    async for part in response.aiter_bytes():
        held += part
        if len(held) > LARGEST_ANSWER:
            raise JudgeRefused(f"answered more than {LARGEST_ANSWER} bytes")
    return bytes(held)


def _content(text: bytes) -> str:
    """The text of the first choice; empty if the model said nothing."""
    try:
        content: Any = json.loads(text)["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise JudgeRefused(f"is no OpenAI-compatible endpoint: it answered {_short(text)}") from error
    return content if isinstance(content, str) else ""


def _short(text: bytes) -> str:
    return text[:LONGEST_SHOWN].decode(errors="replace").strip() or "nothing"


def _pause_s(state: RetryCallState) -> float:
    """What the judge asked for; otherwise twice as long each time. Jitter keeps requests apart."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, _NotNow) and error.after_s is not None:
        return error.after_s + random.uniform(0.0, FIRST_PAUSE_S)
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(state.attempt_number - 1, 16))
    return random.uniform(longest / 2, longest)


def _retry_after_s(response: httpx.Response) -> float | None:
    """The seconds of the header Retry-After, which has seconds or a date."""
    value = response.headers.get("Retry-After", "").strip()
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds)
