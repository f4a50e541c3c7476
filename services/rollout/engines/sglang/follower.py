"""A follower's share of SGLang: the schedulers of one node, without tokenizer and detokenizer."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

from millrace.spec import JobSpec
from services.rollout.engines.lifeline import kill_children, own_descendants
from services.rollout.engines.sglang.launch import lives, set_environment, shut_down, start_engine
from services.rollout.nodes.place import EngineStart
from services.rollout.weights.worker_rpc import SOCKET

LOOK_S = 0.5
"""How often it is looked whether the schedulers live."""


class SglangFollower:
    """See `EngineShare`. The schedulers get requests from the leader's over SGLang's own groups."""

    def __init__(self) -> None:
        # The kernel ends a child with the thread that started it: this thread lives as long as this object.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._others: set[BaseProcess] = set()
        """Children of this process that are none of SGLang's."""
        self._engine: Any = None
        self._building: asyncio.Future[Any] | None = None
        self._reported = asyncio.Event()
        """Set if a scheduler has reported its own failure."""

    async def start(self, spec: JobSpec, start: EngineStart) -> None:
        own_descendants()
        set_environment()
        os.environ[SOCKET] = start.worker_rpc
        loop = asyncio.get_running_loop()
        self._reported.clear()
        # SGLang's processes send their parent this signal when one of them has failed.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGQUIT, self._reported.set)
        self._others = set(multiprocessing.active_children())
        self._building = loop.run_in_executor(self._thread, start_engine, spec, start)
        self._engine = await asyncio.shield(self._building)

    async def died(self) -> str:
        pids = self._engine.get_all_child_pids()
        while all(map(lives, pids)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._reported.wait()
                return "a scheduler of SGLang has failed."
        ended = ", ".join(str(pid) for pid in pids if not lives(pid))
        return f"the scheduler of SGLang with pid {ended} has ended."

    async def stop(self) -> None:
        while self._building is not None and not self._building.done():
            kill_children(self._others)  # again: schedulers may have been started since
            await asyncio.wait({self._building}, timeout=LOOK_S)
        kill_children(self._others)
        engine, self._engine, self._building = self._engine, None, None
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, shut_down, engine)
