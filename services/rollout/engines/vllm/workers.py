"""vLLM's worker processes as the replica calls them: by `WorkerRpc`, or by vLLM's own call between two batches."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from millrace.errors import Unavailable
from services.rollout.engines.adapter import AdapterShape
from services.rollout.weights.worker_messages import Request, decode_reply, encode
from services.rollout.weights.worker_methods import BETWEEN_BATCHES
from services.rollout.weights.worker_rpc import RPC_S, WorkerRpc

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")


class VllmWorkers:
    """See `Workers`. vLLM's own call is answered by the thread that generates, between two batches."""

    def __init__(self) -> None:
        self._rpc = WorkerRpc("vLLM")
        self._llm: Any = None

    async def listen(self, host: str = "") -> str:
        """Where the workers are to connect: see `WorkerRpc.listen`."""
        return await self._rpc.listen(host)

    async def connect(
        self, llm: Any, place: str, adapter: AdapterShape | None, workers: int, within_s: float
    ) -> list[list[str]]:
        """Has every worker of `llm`, an AsyncLLM, connect and make a place for `adapter`. Answers, for each worker, the
        names of the layers whose adapter has no place there. Raises Unavailable where one does not connect in time."""
        self._llm = llm
        shape = "" if adapter is None else adapter.encode()
        unplaced = await self._between_batches("millrace_connect", (place, shape), "connect")
        await self._rpc.wait_for_workers(workers, within_s)
        return unplaced

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """See `Workers`."""
        if not paused and method not in BETWEEN_BATCHES:
            return await self._rpc.ask(method, *arguments)
        name = method.__name__
        request = encode(Request(0, name, arguments, paused, float("inf")))
        replies = await self._between_batches("millrace_call", (request,), name)
        return [decode_reply(reply).result(method) for reply in replies]

    async def _between_batches(self, method: str, arguments: tuple[str | bytes, ...], name: str) -> list[Any]:
        """Calls a method of `WorkerExtension` in every worker. `name` is for the error where one does not answer."""
        try:
            async with asyncio.timeout(RPC_S):
                return list(await self._llm.collective_rpc(method, args=arguments))
        except TimeoutError as error:
            raise Unavailable(f"vLLM's workers did not answer {name} within {RPC_S:g} s.") from error

    async def close(self) -> None:
        """Closes the connections and forgets the AsyncLLM. Idempotent."""
        self._llm = None
        await self._rpc.close()
