"""Which URLs a job may have a service call."""

import asyncio
import ipaddress

import pytest

from millrace.errors import InvalidJob
from millrace.validation.urls import ALLOWED, check_of_job, is_public, resolved

INTERNAL = (
    *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),
)


@pytest.mark.parametrize("address", INTERNAL)
def test_internal_addresses_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(InvalidJob, match="leads to an internal address"):
        check_of_job(f"https://{host}/hook", "webhooks.0.url", "shown")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://hooks.example.com/x", "is not encrypted"),
        ("https://localhost/x", "internal"),
        ("https://a.localhost./x", "internal"),
        ("https://127.1/x", "internal"),
        ("https://0x7f000001/x", "internal"),
        ("https://2130706433/x", "internal"),
        ("https://me:secret@hooks.example.com/x", "has a user"),
        ("https:///x", "is no URL"),
        ("ftp://hooks.example.com/x", "is no URL"),
        ("https://hooks.example.com:99999/x", "is no URL"),
        ("https://[::1/x", "is no URL"),
        ("https://hooks.example.com/a b", "has spaces"),
        ("https://hooks.example.com/" + "a" * 2048, "more than 2048"),
    ],
)
def test_urls_that_a_job_may_not_name(url: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    with pytest.raises(InvalidJob, match=why) as refused:
        check_of_job(url, "webhooks.0.url", "env:HOOK")
    (mistake,) = refused.value.mistakes
    assert mistake.field == "webhooks.0.url" and mistake.fix and "secret@" not in str(refused.value)


def test_an_operator_allows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "*.svc, 127.0.0.0/8, fd00::/8")
    for url in ("http://hooks.svc/x", "http://127.0.0.1:8080/x", "https://[fd00::1]/x", "https://hooks.example.com/x"):
        check_of_job(url, "url", url)
    for url in ("http://10.0.0.1/x", "https://10.0.0.1/x", "http://hooks.example.com/x", "https://[::1]/x"):
        with pytest.raises(InvalidJob):
            check_of_job(url, "url", url)


def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    # Names that the check of the text lets through: the system resolves this one to the loopback, as DNS could.
    parts = check_of_job("https://hooks.example.com/x", "url", "shown")._replace(netloc="localhost")
    with pytest.raises(InvalidJob, match="leads to an internal address"):
        asyncio.run(resolved(parts, "url", "shown"))
    monkeypatch.setenv(ALLOWED, "127.0.0.0/8,::1")
    assert asyncio.run(resolved(parts, "url", "shown")) in ("127.0.0.1", "::1")
    with pytest.raises(InvalidJob, match="has no address"):
        asyncio.run(resolved(parts._replace(netloc="no-such-host.invalid"), "url", "shown"))
