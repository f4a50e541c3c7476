"""A leader and its followers in one process, over real gRPC, without an engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from millrace.errors import MillraceError
from millrace.spec import JobSpec
from millrace.wire.channel import Peer
from millrace.wire.server import Server
from services.rollout.engine import EngineDied
from services.rollout.nodes.follower import Follower, FollowerEnd
from services.rollout.nodes.leader import Leader, servicers
from services.rollout.nodes.place import EngineStart, Place
from tests.services.rollout.coordinator import until

ENGINE = ("vllm", "0.1")
WITHIN_S = 60.0


class Share:
    """A share of an engine that has no processes: it does what a test tells it."""

    def __init__(self) -> None:
        self.started: list[EngineStart] = []
        self.stops = 0
        self.refuse: MillraceError | None = None
        self.hang = False
        self.refuse_when = asyncio.Event()
        self.refuse_when.set()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, spec: JobSpec, start: EngineStart) -> None:
        self.started.append(start)
        if self.refuse is not None:
            await self.refuse_when.wait()
            raise self.refuse
        if self.hang:
            await asyncio.Event().wait()

    async def died(self) -> str:
        return await self.end

    async def stop(self) -> None:
        self.stops += 1


class ReplicaNodes:
    """The leader of `nodes` nodes, whose server can be stopped and started again at the same address."""

    def __init__(self, nodes: int, lost_after_s: float, port: int = 0, generation: str = "rollout-1") -> None:
        self.lost: list[EngineDied] = []
        self.drains = 0
        self.followers: list[Follower] = []
        self.leader = Leader(generation, Place(0, nodes, "127.0.0.1", port or 1), *ENGINE, lost_after_s)
        self.leader.on_lost, self.leader.on_drain = self.lost.append, self._drain
        self.server = Server(servicers(self.leader), "127.0.0.1", port)
        self.watching: asyncio.Task[None]

    def _drain(self) -> None:
        self.drains += 1

    async def __aenter__(self) -> "ReplicaNodes":
        await self.server.start()
        self.watching = asyncio.create_task(self.leader.watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watching.cancel()
        await self.server.stop(0.0)

    @asynccontextmanager
    async def follower(
        self, rank: int = 1, engine: tuple[str, str] = ENGINE, nodes: int | None = None
    ) -> AsyncIterator[tuple[Follower, Share, "asyncio.Task[FollowerEnd]"]]:
        """A follower that runs, its share, and its task."""
        peer, share = Peer(f"127.0.0.1:{self.server.port}"), Share()
        place = Place(rank, nodes or self.leader.place.nodes, "127.0.0.1", self.server.port)
        follower = Follower(peer, place, engine, share)
        running = asyncio.create_task(follower.run(WITHIN_S))
        self.followers.append(follower)
        try:
            yield follower, share, running
        finally:
            self.followers.remove(follower)
            running.cancel()
            await asyncio.wait({running})
            await peer.close()

    async def whole(self) -> None:
        """Waits until all nodes have joined, and each follower knows that it has."""
        await self.leader.whole(WITHIN_S)
        await until(lambda: all(follower.joined for follower in self.followers), WITHIN_S)

    async def start(self, building: Awaitable[int], give_up: Callable[[], None] = lambda: None) -> int:
        """What an engine does: it has the followers start, and starts its own share by `building`."""
        await self.leader.start("tcp://secret@127.0.0.1:1")
        return await self.leader.or_failure(building, give_up)
