"""What the sessions of a replica count for Prometheus."""

import time
from enum import StrEnum

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import sessions as names
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry


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
