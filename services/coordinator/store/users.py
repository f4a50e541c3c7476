"""Users, the hashes of their tokens, and the audit log, in Redis."""

import hashlib
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from millrace.errors import InvalidState, NotFound
from millrace.rest.users import AuditView, NewToken, Role, TokenView, UserView
from services.coordinator.store.connection import Connection, text

USERS, TOKENS, AUDIT = "millrace:users", "millrace:tokens", "millrace:audit"
AUDIT_KEPT = 100_000
"""The newest entries of the audit log."""
PREFIX = "mr_"
"""Tokens of users begin with it, so that a scanner of files finds those that were left there."""


@dataclass(frozen=True)
class Found:
    """Whose token it is, and what it allows."""

    user: str
    token: str
    """The id of the token, not the token itself."""
    role: Role


class Users:
    """Tokens are 256 random bits, so a plain hash of one reveals nothing of it."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def add(self, name: str, role: Role) -> NewToken:
        """Makes a user, and a first token. Raises InvalidState for a name that is taken."""
        record = {"role": role, "created_s": time.time()}
        if not int(await self._redis.do("HSETNX", USERS, name, json.dumps(record))):
            fix = f"choose another name, or make a token: `millrace users token {name}`."
            raise InvalidState(f"there is a user {name} already.", fix)
        return await self._issue(name, record, role)

    async def token(self, name: str, role: Role | None, *, replace: bool) -> NewToken:
        """Makes another token, with the user's role or a lower one. `replace`: the user's other tokens end. Raises
        NotFound, and InvalidState for a role that is higher than the user's."""
        record = await self._record(name)
        most = Role(record["role"])
        if role is not None and not most.allows(role):
            fix = f"take {most} or less, or remove the user and add it with the role {role}."
            raise InvalidState(f"role: {role}: user {name} has the role {most}.", fix)
        if replace:
            await self._end_tokens(name)
        return await self._issue(name, record, role or most)

    async def remove(self, name: str) -> UserView:
        """Ends the user and all of its tokens. Jobs stay, for admins. Raises NotFound."""
        record = await self._record(name)
        await self._redis.do("HDEL", USERS, name)  # from here on none of the tokens is valid
        await self._end_tokens(name)
        return UserView(name=name, role=record["role"], created_s=record["created_s"], tokens=[])

    async def all(self) -> list[UserView]:
        users, tokens = await self._redis.together(("HGETALL", USERS), ("HGETALL", TOKENS))
        records = [json.loads(one) for one in tokens.values()]
        views = []
        for name, record in sorted((text(name), json.loads(one)) for name, one in users.items()):
            own = [TokenView(**each) for each in records if _belongs(each, name, record)]
            own.sort(key=lambda each: each.created_s)
            views.append(UserView(name=name, role=record["role"], created_s=record["created_s"], tokens=own))
        return views

    async def find(self, token: str) -> Found | None:
        """Whose token it is; None if it is nobody's."""
        if not token.startswith(PREFIX) or not (found := await self._redis.do("HGET", TOKENS, _hash(token))):
            return None
        record = json.loads(found)
        user = await self._redis.do("HGET", USERS, record["user"])
        if user is None or not _belongs(record, record["user"], json.loads(user)):
            return None
        return Found(record["user"], record["id"], Role(record["role"]))

    async def _record(self, name: str) -> dict[str, Any]:
        found = await self._redis.do("HGET", USERS, name)
        if found is None:
            raise NotFound(f"there is no user {name}.", "list them with `millrace users list`.")
        record: dict[str, Any] = json.loads(found)
        return record

    async def _issue(self, name: str, user: dict[str, Any], role: Role) -> NewToken:
        made = NewToken(user=name, id=secrets.token_hex(4), role=role, token=f"{PREFIX}{secrets.token_urlsafe(32)}")
        record = {"user": name, "user_created_s": user["created_s"], "id": made.id, "role": role}
        await self._redis.do("HSET", TOKENS, _hash(made.token), json.dumps(record | {"created_s": time.time()}))
        return made

    async def _end_tokens(self, name: str) -> None:
        found = await self._redis.do("HGETALL", TOKENS)
        ended = [key for key, one in found.items() if json.loads(one)["user"] == name]
        if ended:
            await self._redis.do("HDEL", TOKENS, *ended)


class AuditLog:
    """What was changed over REST, by whom."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def add(self, entry: AuditView) -> None:
        await self._redis.do("XADD", AUDIT, "MAXLEN", "~", AUDIT_KEPT, "*", "entry", entry.model_dump_json())

    async def newest(self, limit: int) -> list[AuditView]:
        """The newest entries, the last one first."""
        found = await self._redis.do("XREVRANGE", AUDIT, "+", "-", "COUNT", limit)
        return [AuditView.model_validate_json(fields[b"entry"]) for _, fields in found]


def _belongs(token: dict[str, Any], name: str, user: dict[str, Any]) -> bool:
    """Whether the token is of this user, and not of an earlier one with the same name."""
    return bool(token["user"] == name and token["user_created_s"] == user["created_s"])


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
