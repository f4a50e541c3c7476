"""Who may serve other hosts."""

import pytest

from millrace.errors import InvalidState
from millrace.wire.address import bind_address, is_loopback, require_token


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_a_member_of_one_host_listens_on_the_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
    assert is_loopback(host) and bind_address(host) == host
    require_token(host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "gpu-7.example.org", "localhost.example.org"])
def test_whoever_serves_other_hosts_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
    assert bind_address(host) == "0.0.0.0"
    with pytest.raises(InvalidState, match="no token is set") as told:
        require_token("127.0.0.1", host, insecure=False)
    assert "127.0.0.1" in told.value.fix and "--insecure" in told.value.fix
    require_token(host, insecure=True)
    monkeypatch.setenv("MILLRACE_TOKEN", "secret")
    require_token(host, insecure=False)
