"""Who may serve other hosts."""

import os
import re
from types import SimpleNamespace

import psutil
import pytest

from millrace.errors import InvalidState
from millrace.wire.address import advertise, bind_address, interface_of, require_protection
from millrace.wire.reach import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_a_member_of_one_host_listens_on_the_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
    assert is_loopback(host) and bind_address(host) == host
    require_protection(host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "gpu-7.example.org", "localhost.example.org"])
def test_whoever_serves_other_hosts_needs_a_token_and_tls(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_PLAINTEXT", raising=False)
    monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
    assert bind_address(host) == "0.0.0.0"
    with pytest.raises(InvalidState, match="no token is set") as told:
        require_protection("127.0.0.1", host, insecure=False)
    assert "127.0.0.1" in told.value.fix and "--insecure" in told.value.fix
    require_protection(host, insecure=True)
    monkeypatch.setenv("MILLRACE_TOKEN", "secret")
    with pytest.raises(InvalidState, match=f"TLS is not set up, and other hosts can reach {re.escape(host)}") as told:
        require_protection(host, insecure=False)
    assert "MILLRACE_TLS_CERT" in told.value.fix and "MILLRACE_PLAINTEXT=1" in told.value.fix
    require_protection(host, insecure=True)
    monkeypatch.setenv("MILLRACE_PLAINTEXT", "1")
    require_protection(host, insecure=False)


def test_gloo_listens_at_the_interface_of_the_advertised_address(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": ["127.0.0.1"], "eth0": ["10.1.2.3", "fe80::1%eth0"], "eth1": ["10.4.5.6"]}
    found = {name: [SimpleNamespace(address=address) for address in each] for name, each in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    for variable in ("MILLRACE_HOST", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    advertise("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("MILLRACE_HOST", "10.4.5.6")
    advertise("")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    advertise("10.1.2.3")
    assert (os.environ["MILLRACE_HOST"], os.environ["GLOO_SOCKET_IFNAME"]) == ("10.1.2.3", "eth1")
    assert (interface_of("10.1.2.3"), interface_of("10.9.9.9")) == ("eth0", "")
