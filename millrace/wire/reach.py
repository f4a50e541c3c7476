"""Which hosts reach an address, and whether a proxy may be on the way to it.

Millrace's services reach each other directly, whatever `http_proxy` and its relatives say: `OPTIONS` of
`millrace/wire/channel.py` for gRPC, `trust_env=False` for HTTP. A place outside, which a user names by its URL, is
reached as the environment says, unless it is on this host.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a server that listens at `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def may_take_proxy(url: str) -> bool:
    """Whether the proxies of the environment count for a place outside, at `url`. Raises ValueError for no URL."""
    return not is_loopback(urlsplit(url).hostname or "")


def past_proxies(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a program with `environment`, with which its clients reach the host of `url` directly."""
    host = urlsplit(url).hostname or ""
    listed = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    exempt = [each.strip() for each in listed.split(",") if each.strip()]
    if exempt != ["*"] and host not in exempt:
        exempt.append(host)
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(exempt))
