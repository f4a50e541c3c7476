"""URLs that a job names and that a service calls. They lead to public addresses by https, so that a job cannot have the
service call what only the service reaches; an operator may allow more.
"""

import asyncio
import fnmatch
import ipaddress
import os
import socket
from urllib.parse import SplitResult, urlsplit

from millrace.errors import InvalidJob, refused

ALLOWED = "MILLRACE_WEBHOOK_HOSTS"
"""Environment variable with the hosts that jobs may name although they are internal or speak no https: names, patterns,
addresses and networks, separated by commas: `hooks.corp.example,*.svc,10.2.0.0/16`."""
LONGEST_URL = 2048
RESOLVE_S = 10.0
"""How long a look-up of a name may take."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parsed(url: str, field: str, shown: str) -> SplitResult:
    """The parts of an http or https URL with a host. `shown` stands for it in errors. Raises InvalidJob."""
    fix = "write https://HOST/PATH, with a port where it needs one."
    if len(url) > LONGEST_URL or any(not 33 <= ord(each) <= 126 for each in url):
        reason = f"has spaces, characters beyond ASCII, or more than {LONGEST_URL} characters"
        raise refused(field, shown, reason, fix)
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise refused(field, shown, "is no URL of a host by http or https", fix)
    if parts.username is not None or parts.password is not None:
        raise refused(field, shown, "has a user or a password", "sign messages with a secret in place of it.")
    return parts


def check_of_job(url: str, field: str, shown: str) -> SplitResult:
    """Parses a URL that a job names as `parsed` does. It has to be https, and not lead to an internal address. Names
    are not looked up, which `resolved` does. Raises InvalidJob."""
    parts = parsed(url, field, shown)
    host = str(parts.hostname).rstrip(".")
    if _allowed(host, None):
        return parts
    literal = _address(host)
    if host == "localhost" or host.endswith(".localhost") or (literal is not None and not _may_call(host, literal)):
        raise _internal(field, shown)
    if parts.scheme != "https" and (literal is None or not _allowed(host, literal)):
        fix = f"use https, or have an operator add the host to {ALLOWED}."
        raise refused(field, shown, "is not encrypted", fix)
    return parts


async def resolved(parts: SplitResult, field: str, shown: str) -> str:
    """An address of the host that a job may have called. The caller connects to this address: a second look-up could
    answer another one. Raises InvalidJob if any address of the host is internal, or there is none."""
    host = str(parts.hostname)
    try:
        async with asyncio.timeout(RESOLVE_S):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, parts.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        reason = f"its host has no address: {str(error) or 'the look-up takes too long'}"
        raise refused(field, shown, reason, "correct the host's name.") from error
    addresses = [str(each[4][0]) for each in found]
    if not all(_may_call(host.rstrip("."), ipaddress.ip_address(each.partition("%")[0])) for each in addresses):
        raise _internal(field, shown)
    return addresses[0]


def is_public(address: Address) -> bool:
    """Whether the address belongs to the internet, and so does the IPv4 address in it, if there is one."""
    if address.is_multicast or not address.is_global:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(is_public(each) for each in inner if each is not None)


def _may_call(host: str, address: Address) -> bool:
    return is_public(address) or _allowed(host, address)


def _allowed(host: str, address: Address | None) -> bool:
    """Whether an operator has allowed this host or, if it is known, this address."""
    patterns = [each.strip().lower() for each in os.environ.get(ALLOWED, "").split(",") if each.strip()]
    for pattern in patterns:
        try:
            network = ipaddress.ip_network(pattern, strict=False)
        except ValueError:
            if fnmatch.fnmatchcase(host.lower(), pattern):
                return True
        else:
            if address is not None and address in network:
                return True
    return False


def _address(host: str) -> Address | None:
    """The address that the host is written as, also as 127.1 or 0x7f000001; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.ip_address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _internal(field: str, shown: str) -> InvalidJob:
    fix = f"name a host of the internet, or have an operator add it to {ALLOWED}."
    return refused(field, shown, "leads to an internal address", fix)
