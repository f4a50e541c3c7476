"""The place of a judge: behind a URL, or in a pool of the job."""

import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from millrace.spec.pool import Judge, JudgeTerm
from millrace.validation.secrets import secret_of_job
from millrace.wire.channel import token
from millrace.wire.reach import may_take_proxy
from millrace.wire.tls import scheme, verifying
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
    verify: ssl.SSLContext | bool
    """How the certificate of a place with https is checked; True: by the authorities that this host trusts."""

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
        self.verify: ssl.SSLContext | bool = True

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
        self.verify = verifying()

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
