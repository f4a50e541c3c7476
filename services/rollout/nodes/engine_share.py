"""The protocol of a follower's share of an engine: workers without the engine's front."""

from typing import Protocol

from millrace.descriptors import imported
from millrace.engines import ENGINES
from millrace.spec import JobSpec
from services.rollout.nodes.place import EngineStart


class EngineShare(Protocol):
    """The workers of one node. All methods are called on one event loop and do not block it."""

    async def start(self, spec: JobSpec, start: EngineStart) -> None:
        """Starts the workers, which meet those of the other nodes. Raises InvalidJob for what the job asks wrongly,
        Unavailable where they do not start, or `stop` was called meanwhile."""

    async def died(self) -> str:
        """Waits until a worker has ended by itself; says which, and how. Called once the workers have started."""

    async def stop(self) -> None:
        """Ends every process of the share, also while it starts. Idempotent."""


def create(engine: str) -> EngineShare:
    """The share of an engine that lies on several hosts. It has no workers yet."""
    share: EngineShare = imported(ENGINES[engine].follower)()
    return share
