"""Who may call the REST API: callers with the token. Without a token everybody may, except web pages of other sites."""

import hmac
import ipaddress
from collections.abc import Callable, Collection
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.coordinator.rest.problems import Forbidden, Unauthorized


def bearer(expected: str) -> Callable[..., None]:
    """A FastAPI dependency that checks the token. `expected` is the secret of the services; empty: there is none.

    It raises Unauthorized.
    """
    scheme = HTTPBearer(auto_error=False, description="MILLRACE_TOKEN, where the coordinator has one.")

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(scheme)]) -> None:
        if expected and not hmac.compare_digest((given.credentials if given else "").encode(), expected.encode()):
            raise Unauthorized("the token is missing or wrong.", "send `Authorization: Bearer <token>`.")

    return check


def no_foreign_page(names: Collection[str]) -> Callable[[Request], None]:
    """A FastAPI dependency that refuses requests of other sites' web pages; it raises Forbidden.

    A browser sends what any page asks for, to any address that the browser reaches. `Origin` tells the page's site, but
    a site may give itself a name that resolves to this host (DNS rebinding), so the name in `Host` has to be one of
    the coordinator's `names`. Addresses and names without a dot cannot belong to another site.
    """
    known = {name.lower() for name in names}

    def check(request: Request) -> None:
        host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if "." in name and name not in known and not _is_address(name):
            what = f"Host: {name}: is not a name of this coordinator."
            fix = "use the coordinator's address, set MILLRACE_HOST to this name, or set MILLRACE_TOKEN."
            raise Forbidden(what, fix)
        foreign = origin is not None and origin.lower().partition("://")[2] != host
        if foreign or request.headers.get("sec-fetch-site") == "cross-site":
            what = f"Origin: {origin or 'another site'}: web pages of other sites may not use this coordinator."
            raise Forbidden(what, "use the coordinator's page or the millrace command, or set MILLRACE_TOKEN.")

    return check


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
