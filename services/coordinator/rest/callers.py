"""Who calls the REST API, and whether the caller may: users with tokens, and whoever has the token of the services, who
is an admin. Without a token of the services everybody is, except web pages of other sites."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from millrace.rest.users import FLEET, Role
from services.coordinator.rest.problems import Forbidden, Unauthorized
from services.coordinator.rest.roles import ROLES, Caller
from services.coordinator.store.users import Users


def bearer(expected: str, users: Users) -> Callable[..., Awaitable[None]]:
    """A FastAPI dependency that finds out who calls, then `request.state.caller`, and whether the caller's role allows
    the request. `expected` is the secret of the services; empty: there is none.

    It raises Unauthorized, Forbidden.
    """
    scheme = HTTPBearer(auto_error=False, description="A user's token, or MILLRACE_TOKEN of the services.")

    async def check(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(scheme)]) -> None:
        caller = await _caller(given.credentials if given else "")
        request.state.caller = caller
        needed = ROLES[request.method, request.scope["route"].path]
        if not caller.role.allows(needed):
            what = f"{request.method} {request.url.path}: needs the role {needed}, and this token has {caller.role}."
            raise Forbidden(what, "ask an admin for a token with that role: `millrace users token NAME`.")

    async def _caller(token: str) -> Caller:
        if not expected:
            return Caller("", Role.ADMIN)
        if hmac.compare_digest(token.encode(), expected.encode()):
            return Caller(FLEET, Role.ADMIN)
        if (found := await users.find(token)) is not None:
            return Caller(found.user, found.role, found.token)
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
