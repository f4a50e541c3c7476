"""A follower's share of vLLM: the workers of one node, as `vllm serve --headless` runs them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from millrace.errors import InvalidJob, Unavailable
from millrace.spec import JobSpec
from services.rollout.engines.adapter import adapter_shape
from services.rollout.engines.vllm import options as vllm_options
from services.rollout.engines.vllm.environment import before_start, set_cpu_environment
from services.rollout.engines.vllm.processes import kill_engine, reason
from services.rollout.nodes.place import EngineStart

LOOK_S = 1.0
"""How often it is looked whether the workers have been ended, while they start."""


class VllmFollower:
    """See `EngineShare`. vLLM's executor runs in this process and its workers below; the leader's engine gives them
    their work over vLLM's own connections."""

    def __init__(self) -> None:
        # The kernel ends a child with the thread that started it: this thread lives as long as this object.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._others: set[BaseProcess] = set()
        """Child processes that vLLM did not start."""
        self._executor: Any = None
        self._building: asyncio.Future[Any] | None = None
        self._ended: asyncio.Future[str] | None = None

    async def start(self, spec: JobSpec, start: EngineStart) -> None:
        loop = asyncio.get_running_loop()
        self._others = before_start()
        self._building = loop.run_in_executor(self._thread, self._build, spec, start)
        self._executor = await asyncio.shield(self._building)
        self._ended = loop.run_in_executor(None, _first_end, [each.proc for each in self._executor.workers])

    def _build(self, spec: JobSpec, start: EngineStart) -> Any:
        """Starts the workers, which meet those of the other nodes; returns vLLM's executor. Runs in `_thread`."""
        from vllm.platforms import current_platform
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        if current_platform.is_cpu():
            set_cpu_environment()
        try:
            arguments = vllm_options.engine_arguments(spec, adapter_shape(spec), start)
            config = arguments.create_engine_config(headless=True)
            vllm_options.check_model(config)
        except (ValueError, TypeError, OSError) as error:
            what = f"vLLM refused model.path {spec.model.path} with rollout.engine_options: {reason(error)}."
            raise InvalidJob(what, "fix the named option; vLLM's log on that host says more.") from error
        try:
            return MultiprocExecutor(config, monitor_workers=False)
        except Exception as error:  # what vLLM raises when a worker ends has no type of its own
            what = f"vLLM's workers did not start with {spec.model.path}: {error}"
            raise Unavailable(what, "its log on that host names the cause; memory and CUDA devices first.") from error

    async def died(self) -> str:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        while self._building is not None and not self._building.done():
            kill_engine(self._others)  # again: workers may have been started since
            await asyncio.wait({self._building}, timeout=LOOK_S)
        kill_engine(self._others)
        executor, self._executor, self._building, self._ended = self._executor, None, None, None
        if executor is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, executor.shutdown)


def _first_end(workers: list[BaseProcess]) -> str:
    """Waits until one of the workers ends; says which, and how."""
    ended = wait([worker.sentinel for worker in workers])
    worker = next(worker for worker in workers if worker.sentinel in ended)
    worker.join()
    return f"{worker.name} has ended with status {worker.exitcode}."
