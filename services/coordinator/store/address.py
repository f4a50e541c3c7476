"""REDIS_URL: which Redis, how it is reached, and what is refused.

redis://[user:password@]host:port/db, rediss:// by TLS, unix:///path, and by Sentinel
redis+sentinel://[user:password@]host1:26379,host2:26379/service[/db], rediss+sentinel:// by TLS.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from millrace.errors import InvalidState, wrong_value

FIELD = "REDIS_URL"
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS = (*FILES, "ssl_ca_path", "ssl_ca_data", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname", "ssl_min_version")
OTHERS = ("db", "username", "password", "client_name")
OF_SENTINEL = ("sentinel_username", "sentinel_password")
SENTINEL_PORT = 26379
SENTINEL_S = 1.0
"""How long a Sentinel may take to say which Redis leads; then the next one is asked."""
NO_CLUSTER = (
    "the state of a job is many keys that change together in one script, and a Redis Cluster spreads keys over servers",
    "use one Redis with replicas and Sentinel: redis+sentinel://host1:26379,host2:26379/service.",
)
"""Why a Redis Cluster is refused, and what to use."""


class SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the Redis that Sentinel names as the master. A caller waits if all are in use."""


def pool(url: str, options: Mapping[str, Any]) -> ConnectionPool:
    """The connections to the Redis of `url`, each with these `options`. Raises InvalidState."""
    parts = urlsplit(url)
    if "cluster" in parts.scheme:
        raise refused(url, *NO_CLUSTER)
    if parts.scheme not in SCHEMES:
        raise refused(url, "has another scheme", f"begin with one of {', '.join(f'{each}://' for each in SCHEMES)}.")
    _check_query(url, parts)
    try:
        if "sentinel" not in parts.scheme:
            return BlockingConnectionPool.from_url(url, **options)
        return _of_sentinel(url, parts, options)
    except ValueError as error:
        raise refused(url, str(error), "write redis://host:6379/0.") from error


def _check_query(url: str, parts: SplitResult) -> None:
    encrypted = parts.scheme.startswith("rediss")
    known = (*OTHERS, *(TLS if encrypted else ()), *(OF_SENTINEL if "sentinel" in parts.scheme else ()))
    for name, values in parse_qs(parts.query).items():
        if name in TLS and not encrypted:
            raise refused(url, f"{name} is for TLS", "begin with rediss:// or rediss+sentinel://.")
        if name not in known:
            raise refused(url, f"{name} is no option here", f"use one of {', '.join(known)}.")
        if name in FILES and not Path(values[0]).is_file():
            raise refused(url, f"{name}: {values[0]} is no file", "name a PEM file that this process can read.")


def _of_sentinel(url: str, parts: SplitResult, options: Mapping[str, Any]) -> ConnectionPool:
    userinfo, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise refused(url, "names no service", "add the name that Sentinel has for the master: …/mymaster.")
    encrypted = parts.scheme.startswith("rediss")
    # What redis-py reads from the URL of one server, without its host.
    plain = parts._replace(scheme="rediss" if encrypted else "redis", netloc=f"{userinfo}@" if userinfo else "")
    given: dict[str, Any] = dict(parse_url(plain._replace(path=f"/{db}").geturl()))
    given.pop("connection_class", None)
    own = {name.removeprefix("sentinel_"): given.pop(name) for name in OF_SENTINEL if name in given}
    tls = {"ssl": True, **{name: given[name] for name in TLS if name in given}} if encrypted else {}
    # A Sentinel that stands still is given up by redis-py's own timeout, or the next one would never be asked.
    sentinel = Sentinel(
        [_host(url, each) for each in hosts.split(",")],
        sentinel_kwargs={"socket_timeout": SENTINEL_S, "socket_connect_timeout": SENTINEL_S, **own, **tls},
    )
    # redis-py has no types here.
    return SentinelPool(unquote(service), sentinel, **{**given, **tls, **options})  # type: ignore[no-untyped-call]


def _host(url: str, text: str) -> tuple[str, int]:
    try:
        one = urlsplit(f"//{text}")
        host, port = one.hostname, one.port
    except ValueError as error:
        raise refused(url, f"{text}: {error}", "write host:port for each Sentinel, with commas.") from error
    if not host:
        raise refused(url, "the address of a Sentinel is empty", "write host:port for each Sentinel, with commas.")
    return host, port or SENTINEL_PORT


def refused(url: str, reason: str, fix: str) -> InvalidState:
    """The error for a URL that cannot be used. It shows no password."""
    wrong = wrong_value(FIELD, shown(url), reason, fix)
    return InvalidState(wrong.what, wrong.fix)


def shown(url: str) -> str:
    """The URL without what may hold a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
