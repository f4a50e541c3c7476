"""/v1/users and /v1/audit: who may do what, and what was done."""

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query

from millrace.errors import InvalidState
from millrace.rest.users import FLEET, NAME, AuditView, NewToken, Role, UserView
from services.coordinator.rest.schema import error_responses
from services.coordinator.store.users import AuditLog, Users

Name = Annotated[str, Path(pattern=NAME, description="A user's name.")]
ERRORS = error_responses({404: "No such user.", 409: "The state of the user does not allow it."})


def routes(users: Users, audit: AuditLog) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["users"])

    @router.get("/users")
    async def show() -> list[UserView]:
        """All users, with the ids of their tokens."""
        return await users.all()

    @router.post("/users", status_code=201, responses=ERRORS)
    async def add(
        name: Annotated[str, Body(pattern=NAME, description="Small letters, digits, dots and dashes.")],
        role: Annotated[Role, Body()] = Role.SUBMIT,
    ) -> NewToken:
        """Adds a user; answers its first token, which is told only here."""
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
