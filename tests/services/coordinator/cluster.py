"""A coordinator process with simulated peers around it, for scenarios written top to bottom."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from millrace.errors import Unavailable
from millrace.events import Event
from millrace.rest import JobState, JobView, LedgerView
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.services.coordinator.peers import Member, Shape, SimulatedReplica, SimulatedTrainer

ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def named(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """The same job under another name, with an output of its own."""
    return spec | {"name": name, "output": f"{spec['output']}-{name}"}


class Cluster:
    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.coordinator = coordinator
        self.members: list[Member] = []

    async def trainer(self, partition: str = "", **options: Any) -> SimulatedTrainer:
        return await self._join(SimulatedTrainer(self.coordinator.address, **options), partition)

    async def replica(self, partition: str = "", **shape: Any) -> SimulatedReplica:
        return await self._join(SimulatedReplica(self.coordinator.address, Shape(**shape)), partition)

    async def _join(self, member: Any, partition: str) -> Any:
        member.partition = partition
        await member.start()
        self.members.append(member)
        return member

    async def submit(self, spec: dict[str, Any]) -> str:
        return (await asyncio.to_thread(self.coordinator.client.submit, spec)).id

    async def job(self, job_id: str) -> JobView:
        return await asyncio.to_thread(self.coordinator.client.job, job_id)

    async def ledger(self, job_id: str) -> LedgerView:
        return await asyncio.to_thread(self.coordinator.client.ledger, job_id)

    async def events(self, job_id: str, kind: str = "") -> list[Event]:
        found = await asyncio.to_thread(lambda: list(self.coordinator.client.events(job_id, follow=False)))
        return [event for event in found if not kind or event.kind == kind]

    async def reached(self, job_id: str, step: int, within_s: float = 60.0) -> JobView:
        return await until(lambda: self.job(job_id), lambda job: job.step >= step or job.state in ENDED, within_s)

    async def ended(self, job_id: str, within_s: float = 60.0) -> JobView:
        return await until(lambda: self.job(job_id), lambda job: job.state in ENDED, within_s)

    async def close(self) -> None:
        for member in self.members:
            await member.leave()


async def until(ask: Callable[[], Awaitable[Any]], enough: Callable[[Any], bool] = bool, within_s: float = 60.0) -> Any:
    """What `ask` answers once it is enough. A Redis that is just restarting is no answer."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(Unavailable):
                found = await ask()
                if enough(found):
                    return found
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def around(coordinator: CoordinatorProcess) -> AsyncIterator[Cluster]:
    cluster = Cluster(coordinator)
    try:
        yield cluster
    finally:
        await cluster.close()


def scenario(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test that takes (cluster, spec). The tests of a file share a coordinator: one that kills it starts
    it again."""

    def run(shared: CoordinatorProcess, spec: dict[str, Any]) -> None:
        asyncio.run(_played(test, shared, spec))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def _played(test: Callable[..., Awaitable[None]], process: CoordinatorProcess, spec: dict[str, Any]) -> None:
    async with around(process) as cluster:
        await test(cluster, spec)
