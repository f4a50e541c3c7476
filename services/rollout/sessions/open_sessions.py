"""The sessions of a replica that are open, those of them that wait for an agent, and what they count for Prometheus."""

import asyncio
import hmac
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import sessions as names
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from services.rollout.dialects.requests import Refusals, Refused
from services.rollout.sessions.session import Session


class Api(StrEnum):
    """What a request asks for."""

    CLAIM = "claim"
    DESCRIBE = "describe"
    REWARD = "reward"
    END = "end"
    MODELS = "models"
    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    GENERATE = "generate"


class SessionMetrics:
    """The counts of one replica since its start."""

    def __init__(self, registry: DeclaredRegistry | None = None) -> None:
        """`registry`: of the replica's page; None: the counts are on no page."""
        self._registry = registry or DeclaredRegistry(Owner.REPLICA)
        names.ABANDONED.on(self._registry)
        for api in Api:
            names.OVERHEAD_S.on(self._registry).labels(api)
            names.REQUESTS.on(self._registry).labels(api, "200")
        names.REQUESTS.on(self._registry).labels(Api.CLAIM, "429")

    def answered(self, api: Api, status: int) -> None:
        """A request got an answer with this status."""
        names.REQUESTS.on(self._registry).labels(api, str(status)).inc()

    def turn(self, api: Api, arrived: float, engine_s: float) -> None:
        """The answer to a request for a turn is made now. `arrived`: when the last byte of the request did, on the
        clock `time.perf_counter`; `engine_s`: seconds that the engine took of the time since."""
        self.overhead(api, time.perf_counter() - arrived - engine_s)

    def overhead(self, api: Api, seconds: float) -> None:
        """The endpoint itself took `seconds` for a turn."""
        names.OVERHEAD_S.on(self._registry).labels(api).observe(seconds)

    def abandoned(self) -> None:
        """The time of a session is over before its agent has ended it."""
        names.ABANDONED.on(self._registry).inc()

    def show(self, opened: int, waiting: int) -> None:
        """Sets the gauges."""
        names.OPEN.on(self._registry).set(opened)
        names.WAITING.on(self._registry).set(waiting)


class Endpoint(Protocol):
    """The server of the sessions."""

    url: str
    """The endpoint's address, `http://host:port`."""

    async def serve_also(self, listener: socket.socket) -> asyncio.Server:
        """Answers requests at another listening socket too, until the server that is returned is closed."""


class OpenSessions:
    """Every session from its beginning to its end."""

    def __init__(self, metrics: SessionMetrics | None = None) -> None:
        """`metrics`: counts of the replica's page; None: the counts are on no page."""
        self.metrics = metrics or SessionMetrics()
        self.endpoint: Endpoint | None = None
        """The server that answers for them; None: nobody reaches them."""
        self._open: dict[str, Session] = {}
        self._waiting: deque[tuple[Session, asyncio.Event]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Sessions that no agent has claimed."""
        return len(self._waiting)

    @contextmanager
    def hold(self, session: Session) -> Iterator[None]:
        """Keeps a session open, and closes it in the end."""
        self._open[session.id] = session
        try:
            yield
        finally:
            del self._open[session.id]
            session.close()

    async def offer(self, session: Session, deadline_s: float) -> None:
        """Waits until an agent claims the session. From then on it has `deadline_s` seconds."""
        entry = session, asyncio.Event()
        self._waiting.append(entry)
        try:
            await entry[1].wait()
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise
        session.deadline = asyncio.get_running_loop().time() + deadline_s

    def claim(self) -> Session:
        """The session that has waited longest for an agent. Raises Refused if none waits."""
        if not self._waiting:
            raise Refused(Refusals.BUSY, "no episode waits for an agent here.", "ask again, or ask another replica.")
        session, claimed = self._waiting.popleft()
        claimed.set()
        return session

    def find(self, session_id: str, key: str) -> Session:
        """The open session with this id, for a caller with its key. Raises Refused."""
        session = self._open.get(session_id)
        if session is None:
            what = f"{session_id[:64]} is not an open session here."
            raise Refused(Refusals.UNKNOWN, what, "claim another episode: this one is over, or of another replica.")
        if not hmac.compare_digest(key.encode(), session.key.encode()):
            raise Refused(Refusals.UNAUTHENTICATED, f"the key is not that of {session.id}.", "send the session's key.")
        return session
