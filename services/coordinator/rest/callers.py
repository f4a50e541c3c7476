"""Who may ask: whoever has the token; without one everybody but the web pages of others."""

import hmac
import ipaddress
from collections.abc import Callable, Collection
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.coordinator.rest.problems import Forbidden, Unauthorized


def bearer(expected: str) -> Callable[..., None]:
    """Checks the token that the services share, where there is one."""
    scheme = HTTPBearer(auto_error=False, description="MILLRACE_TOKEN, where the coordinator has one.")

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(scheme)]) -> None:
        if expected and not hmac.compare_digest((given.credentials if given else "").encode(), expected.encode()):
            raise Unauthorized("the token is missing or wrong.", "send `Authorization: Bearer <token>`.")

    return check


def no_foreign_page(names: Collection[str]) -> Callable[[Request], None]:
    """A browser sends what any page asks of any address that it reaches, and a name of the page's own may lead here.

    `names` are the coordinator's. Addresses and names without a dot are nobody's to give away.
    """
    known = {name.lower() for name in names}

    def check(request: Request) -> None:
        host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if "." in name and name not in known and not _is_address(name):
            what = f"this coordinator does not know that it is called {name!r}."
            raise Forbidden(what, "ask for it by its address, let MILLRACE_HOST be this name, or set MILLRACE_TOKEN.")
        foreign = origin is not None and origin.lower().partition("://")[2] != host
        if foreign or request.headers.get("sec-fetch-site") == "cross-site":
            what = f"this is asked by a web page of {origin or 'another site'}, not by the coordinator's own."
            raise Forbidden(what, "use the coordinator's page or the millrace command, or set MILLRACE_TOKEN.")

    return check


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
