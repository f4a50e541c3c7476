"""What the replica asks of SGLang's schedulers besides `WorkerMethods`."""

from typing import Protocol

from services.rollout.weights.worker_methods import WorkerMethods


class SglangMethods(WorkerMethods, Protocol):
    """Implemented by `worker.SglangReceiver`."""

    def label(self, version: int, cache_key: str) -> None:
        """Tokens that are sampled from now on are of `version`. Requests that wait to be prefilled, some of them again,
        find none of the old version's keys and values. Only while generation is paused."""
