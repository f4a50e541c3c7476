"""What vLLM's scheduler tells of itself."""

import time
from dataclasses import replace
from typing import Any

from services.rollout.engine import EngineStats


class SchedulerStats:
    """Stands where AsyncLLM has its loggers of statistics, and keeps the last numbers."""

    def __init__(self) -> None:
        self.last: EngineStats | None = None
        """None before the first step."""
        self.last_step_s = 0.0
        """When the last step's tokens arrived (time.perf_counter())."""
        self._prompt_tokens = self._cached_prompt_tokens = self._preempted = 0
        self._cleared = self._cleared_left = 0
        """Requests whose keys and values were cleared by a pause; those of them that may not have begun again yet."""
        self._others: Any = None

    @property
    def idle(self) -> EngineStats:
        """The numbers of an engine that has nothing to do."""
        return EngineStats(0, 0, 0.0, self._prompt_tokens, self._cached_prompt_tokens, self._preempted)

    def attach(self, llm: Any, *, others: bool) -> None:
        """Takes the place of the loggers of an AsyncLLM that was built with statistics and has not generated yet.
        `others`: whether the loggers go on, as the job asks for them; otherwise single outputs are not looked at."""
        if others:
            self._others = llm.logger_manager
        else:
            llm.log_stats = llm.output_processor.log_stats = False
        llm.logger_manager = self

    def cleared(self, requests: int) -> None:
        """A pause made all running requests, at most `requests`, give up their keys and values. vLLM preempts them for
        that, and counts them like those for which its cache had no room."""
        self._cleared = self._cleared_left = requests

    def record(self, *arguments: Any, scheduler_stats: Any = None, **named: Any) -> None:
        """Called by AsyncLLM with the outputs of each step."""
        self.last_step_s = time.perf_counter()
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
            if (prompts := scheduler_stats.prefix_cache_stats) is not None:
                self._prompt_tokens += prompts.queries
                self._cached_prompt_tokens += prompts.hits
                self._count_preempted(prompts.preempted_requests, waiting)
            running, used = scheduler_stats.num_running_reqs, float(scheduler_stats.kv_cache_usage)
            self.last = replace(self.idle, running=running, waiting=waiting, cache_used=used)
        if self._others is not None:
            self._others.record(*arguments, scheduler_stats=scheduler_stats, **named)

    def _count_preempted(self, begun_again: int, waiting: int) -> None:
        """`begun_again`: preempted requests that have a slot again since the last step. Those that a pause preempted
        come first, so that none of them is left once nothing waits."""
        by_pause = min(begun_again, self._cleared_left)
        self._preempted += begun_again - by_pause
        self._cleared_left -= by_pause
        if self._cleared_left < self._cleared and waiting == 0:
            self._cleared = self._cleared_left = 0

    def __getattr__(self, name: str) -> Any:
        """What else AsyncLLM calls of its loggers: theirs, or nothing."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing if self._others is None else getattr(self._others, name)


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""
