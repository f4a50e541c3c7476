"""Who calls the REST API, and whether the caller may; and /v1/users and /v1/audit: who may do what, and what was done.
An endpoint that is not in the table of roles cannot be served: see `application`.

Callers are users with tokens. A caller with the token of the services is an admin. Without a token of the services
everybody is, except web pages of other sites.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from millrace.errors import InvalidState, MillraceError
from millrace.rest.users import FLEET, NAME, AuditView, NewToken, Role, UserView
from services.coordinator.rest.problems import Forbidden, Unauthorized
from services.coordinator.rest.schema import Guards, error_responses, subject
from services.coordinator.store.users import AuditLog, Users

Name = Annotated[str, Path(pattern=NAME, description="A user's name.")]
ERRORS = error_responses({404: "No such user.", 409: "The state of the user does not allow it."})


def routes(guards: Guards, users: Users, audit: AuditLog) -> APIRouter:
    router = subject("/v1", "users", guards)

    @router.get("/users")
    async def show() -> list[UserView]:
        """All users, with the ids of their tokens."""
        return await users.all()

    @router.post("/users", status_code=201, responses=ERRORS)
    async def add(
        name: Annotated[str, Body(pattern=NAME, description="Small letters, digits, dots and dashes.")],
        role: Annotated[Role, Body()] = Role.SUBMIT,
    ) -> NewToken:
        """Adds a user; answers its first token, which is shown only once."""
        if name == FLEET:
            raise InvalidState(f"name: {name}: stands for the token of the services.", "choose another name.")
        return await users.add(name, role)

    @router.delete("/users/{name}", responses=ERRORS)
    async def remove(name: Name) -> UserView:
        """Removes a user: its tokens end at once. Its jobs go on, and admins see them."""
        return await users.remove(name)

    @router.post("/users/{name}/tokens", status_code=201, responses=ERRORS)
    async def token(
        name: Name,
        role: Annotated[Role | None, Body(embed=True, description="The user's role or a lower one.")] = None,
        replace: Annotated[bool, Body(embed=True, description="The user's other tokens end.")] = False,
    ) -> NewToken:
        """Makes another token of a user."""
        return await users.token(name, role, replace=replace)

    @router.get("/audit")
    async def entries(
        limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
    ) -> list[AuditView]:
        """The newest requests that changed something or were not allowed, the last one first."""
        return await audit.newest(limit)

    return router


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
            raise Forbidden(what, f"ask an admin for a token of it: `millrace users token NAME --role {needed}`.")

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

    A browser sends what any page asks for, to any address that the browser reaches. `Origin` names the page's site, but
    a site may give itself a name that resolves to this host (DNS rebinding), so the name in `Host` has to be one of the
    coordinator's `names`. Addresses and names without a dot cannot belong to another site.
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


ROLES: Mapping[tuple[str, str], Role] = {
    ("POST", "/v1/jobs"): Role.SUBMIT,
    ("GET", "/v1/jobs"): Role.READ,
    ("GET", "/v1/jobs/{job_id}"): Role.READ,
    ("PATCH", "/v1/jobs/{job_id}"): Role.SUBMIT,
    ("DELETE", "/v1/jobs/{job_id}"): Role.SUBMIT,
    ("POST", "/v1/jobs/{job_id}/delete"): Role.SUBMIT,
    ("POST", "/v1/jobs/{job_id}/pause"): Role.SUBMIT,
    ("POST", "/v1/jobs/{job_id}/resume"): Role.SUBMIT,
    ("GET", "/v1/jobs/{job_id}/metrics"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/metrics/keys"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/series"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/histograms"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/samples"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/groups"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/tokens/{record}"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/prompts/{prompt_id}/images/{number}"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/spec"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/ledger"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/events"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/publications"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/timeline"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/diagnosis"): Role.READ,
    ("GET", "/v1/fleet"): Role.READ,
    ("POST", "/v1/fleet/{member_id}/drain"): Role.ADMIN,
    ("GET", "/v1/fleet/{member_id}/log"): Role.ADMIN,  # it names the jobs of all
    ("GET", "/v1/spec/schema"): Role.READ,
    ("POST", "/v1/spec/validate"): Role.SUBMIT,  # it looks at files
    ("POST", "/v1/webhooks/test"): Role.ADMIN,
    ("POST", "/v1/jobs/{job_id}/webhooks/test"): Role.SUBMIT,
    ("GET", "/v1/users"): Role.ADMIN,
    ("POST", "/v1/users"): Role.ADMIN,
    ("DELETE", "/v1/users/{name}"): Role.ADMIN,
    ("POST", "/v1/users/{name}/tokens"): Role.ADMIN,
    ("GET", "/v1/audit"): Role.ADMIN,
}


@dataclass(frozen=True)
class Caller:
    """Who makes a request."""

    user: str
    """Empty if the coordinator has no token and takes everybody for an admin."""
    role: Role
    token: str = ""
    """Id of the user's token."""

    def sees(self, owner: str) -> bool:
        """Whether the caller may know of a job of `owner`."""
        return self.role is Role.ADMIN or owner == self.user


def check_table(served: set[tuple[str, str]]) -> None:
    """Raises MillraceError if an endpoint has no role, or a role has no endpoint. `served`: methods and paths."""
    if wrong := sorted(served ^ ROLES.keys()):
        listed = ", ".join(f"{method} {path}" for method, path in wrong)
        raise MillraceError(f"endpoints without a role, or roles without an endpoint: {listed}.", "correct ROLES.")
