"""Which hosts reach an address, and whether a proxy may be on the way to it.

Millrace's services reach each other directly, whatever `http_proxy` and its relatives say: `OPTIONS` of
`millrace/wire/channel.py` for gRPC, `trust_env=False` for HTTP. A place outside, which a user names by its URL, is
reached as the environment says, unless it is on this host.
"""

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from millrace.errors import InvalidState, wrong_value

MOST_ADDRESSES = 16
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\],@]+):(\d{1,5})")
"""host:port"""


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a server that listens at `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def addresses(text: str, field: str = "MILLRACE_COORDINATOR") -> list[str]:
    """The addresses, host:port each, in a list with commas; a single one as it is. Raises InvalidState, which names the
    `field`."""
    found = [each.strip() for each in text.split(",")]
    if len(found) == 1:
        return found
    for each in found:
        match = ADDRESS.fullmatch(each)
        if match is None or not 0 < int(match[2]) < 65_536:
            raise _not_addresses(field, text, f"{each or 'an empty address'} is not host:port")
    if len(set(found)) < len(found):
        raise _not_addresses(field, text, "an address comes twice")
    if len(found) > MOST_ADDRESSES:
        raise _not_addresses(field, text, f"holds more than {MOST_ADDRESSES} addresses")
    return found


def _not_addresses(field: str, text: str, reason: str) -> InvalidState:
    wrong = wrong_value(field, text, reason, "write host1:7600,host2:7600: the address of each coordinator once.")
    return InvalidState(wrong.what, wrong.fix)


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
