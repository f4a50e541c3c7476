"""All workers of one engine, as the replica calls them: over sockets, or in the replica's own process."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

from millrace.errors import MillraceError
from services.rollout.weights.worker_messages import Request, carry_out
from services.rollout.weights.worker_methods import WorkerMethods

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")


class WorkerDied(MillraceError):
    """The process of a worker ended during a call."""


class Workers(Protocol):
    """`method` is one of `WorkerMethods`; the answers come in the order of the ranks."""

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """Calls the method in every worker, during generation. A method of BETWEEN_BATCHES, and any with `paused`,
        runs in the thread that generates: between two batches, and with `paused` once generation has stopped.

        Raises PublicationFailed for the first worker that failed, WorkerDied if a worker is gone, Unavailable if
        one does not answer in time.
        """


class InProcessWorker:
    """The one worker of an engine that computes in the replica's own process. Its methods run in a thread of the
    event loop's pool; the caller has paused generation for those that need it."""

    def __init__(self, receiver: WorkerMethods) -> None:
        self._receiver = receiver

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """See `Workers`."""
        request = Request(0, method.__name__, arguments, paused, float("inf"))
        reply = await asyncio.to_thread(carry_out, self._receiver, request)
        return [reply.result(method)]
