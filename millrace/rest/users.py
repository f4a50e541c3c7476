"""Users of REST, their tokens and roles, and the log of what they changed."""

from enum import StrEnum

from pydantic import BaseModel, Field

NAME = r"^[a-z][a-z0-9._-]{0,62}$"
"""A user's name."""
FLEET = "fleet"
"""Who calls with MILLRACE_TOKEN, the token of the services: an admin. No user has this name."""


class Role(StrEnum):
    """What a token allows. Each role allows what those before it allow."""

    READ = "read"
    """May look at their own jobs and at the fleet."""
    SUBMIT = "submit"
    """May submit jobs, and change their own."""
    ADMIN = "admin"
    """Everything: the jobs of all, the fleet, users, the audit log."""

    def allows(self, needed: "Role") -> bool:
        order = [*Role]
        return order.index(self) >= order.index(needed)


class TokenView(BaseModel):
    """A token of a user. The token itself is shown once, when it is made."""

    id: str = Field(description="Names the token, in the audit log too.")
    role: Role
    created_s: float = Field(description="Unix time.")


class UserView(BaseModel):
    name: str
    role: Role = Field(description="The most that a token of this user allows.")
    created_s: float = Field(description="Unix time.")
    tokens: list[TokenView]


class NewToken(BaseModel):
    """A token that was made. It is not stored, only its hash is: keep it."""

    user: str
    id: str
    role: Role
    token: str


class AuditView(BaseModel):
    """A request that changed something, or that a user was not allowed to make."""

    time_s: float = Field(description="Unix time.")
    user: str = Field(description="Who asked; `fleet` with the token of the services, empty without any token.")
    token: str = Field(description="Id of the user's token.")
    peer: str = Field(description="The address that the request came from.")
    method: str
    path: str
    status: int
    made: str = Field(description="Path of what the request made; empty for others.")
