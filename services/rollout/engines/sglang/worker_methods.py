"""What the replica asks of SGLang's schedulers besides `WorkerMethods`."""

from collections.abc import Callable
from typing import Any, Protocol

from services.rollout.weights.worker_methods import BETWEEN_BATCHES, WorkerMethods


class SglangMethods(WorkerMethods, Protocol):
    """Implemented by `worker.SglangReceiver`."""

    def add_adapter(self, shape: str) -> list[str]:
        """Makes a place for an adapter of this shape (`AdapterShape.encode`), with zeros. Answers the names of the
        layers that have no place in this scheduler. Called once, before the first publication."""

    def label(self, version: int, cache_key: str) -> None:
        """Tokens that are sampled from now on are of `version`. Requests that wait to be prefilled, some of them again,
        find none of the old version's keys and values. Only while generation is paused."""


SGLANG_BETWEEN_BATCHES: frozenset[Callable[..., Any]] = BETWEEN_BATCHES | {SglangMethods.add_adapter}
"""Methods that only the scheduler's own thread may call, between two batches."""
