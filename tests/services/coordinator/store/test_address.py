"""REDIS_URL: what is refused, with its reason, and never with its password."""

from pathlib import Path

import pytest
from redis.asyncio.sentinel import SentinelManagedSSLConnection

from millrace.errors import InvalidState
from services.coordinator.store.address import SentinelPool, pool


@pytest.mark.parametrize(
    "url,told",
    [
        ("redis+cluster://:secret@one:6379", "a Redis Cluster spreads keys over servers"),
        ("http://:secret@one:6379", "has another scheme"),
        ("redis://:secret@one:6379?ssl_ca_certs=/ca.pem", "ssl_ca_certs is for TLS"),
        ("rediss://:secret@one:6379?ssl_ca_certs=/no/ca.pem", "ssl_ca_certs: /no/ca.pem is no file"),
        ("redis://:secret@one:6379?socket_timeout=3", "socket_timeout is no option here"),
        ("redis://:secret@one:6379?sentinel_password=x", "sentinel_password is no option here"),
        ("redis+sentinel://:secret@one:26379,two:26379", "names no service"),
        ("redis+sentinel://:secret@one:26379,two:x/millrace", "two:x: "),
        ("redis+sentinel://:secret@one:26379,/millrace", "the address of a Sentinel is empty"),
        ("redis://:secret@one:123456", "Port out of range"),
    ],
)
def test_a_url_that_cannot_be_used_is_named(url: str, told: str) -> None:
    with pytest.raises(InvalidState, match="REDIS_URL: ") as refused:
        pool(url, {})
    assert told in refused.value.what and "secret" not in str(refused.value) and refused.value.fix


def test_sentinels_and_the_server_have_their_own_passwords() -> None:
    made = pool("redis+sentinel://me:p%40ss@one:26379,two/millrace/3?sentinel_password=other", {"max_connections": 7})
    assert isinstance(made, SentinelPool) and (made.service_name, made.max_connections) == ("millrace", 7)
    wanted = {"username": "me", "password": "p@ss", "db": 3}
    assert wanted.items() <= made.connection_kwargs.items()
    asked = [one.connection_pool.connection_kwargs for one in made.sentinel_manager.sentinels]
    assert [(each["host"], each["port"], each["password"]) for each in asked] == [
        ("one", 26379, "other"),
        ("two", 26379, "other"),
    ]


def test_by_tls_both_are_checked_with_the_same_files(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    made = pool(f"rediss+sentinel://one/millrace?ssl_ca_certs={ca}", {})
    assert made.connection_class is SentinelManagedSSLConnection
    assert made.connection_kwargs["ssl_ca_certs"] == str(ca)
    (sentinel,) = made.sentinel_manager.sentinels  # type: ignore[attr-defined]
    assert sentinel.connection_pool.connection_kwargs["ssl_ca_certs"] == str(ca)
