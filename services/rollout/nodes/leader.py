"""The leader: which followers have joined, what they are to do, whether they are alive; and its gRPC service."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import structlog

from millrace.contracts.v1 import nodes_pb2, nodes_pb2_grpc
from millrace.errors import Fenced, InvalidJob, InvalidState, Unavailable
from millrace.local.ports import free_port
from millrace.wire.address import host_address
from millrace.wire.channel import PROTOCOL_VERSION
from millrace.wire.membership import note_drained
from millrace.wire.server import Context
from services.rollout.engine import EngineDied
from services.rollout.member.member import FleetMember
from services.rollout.nodes.place import EngineStart, Place

log = structlog.get_logger(__name__)
Result = TypeVar("Result")
WAIT_S = 1.0
"""How long a beat waits for a new order."""
LOOKS = 8
"""How often within the longest silence it is looked whether the followers are alive."""
IDLE_S = 20.0
"""How long the followers may take to end their workers."""
HEARD_S = 5 * WAIT_S
"""How long a follower that is alive may take until its next beat."""
LEAVE_S = 5.0
"""How long the leader waits until the followers know that the replica ends."""


class NodeLost(EngineDied):
    """A follower is lost, and so is the replica."""


@dataclass
class _Follower:
    rank: int
    host: str
    life: str
    heard: float = field(default_factory=time.monotonic)
    order: int = 0
    """The newest order that it knows; its state is about this one."""
    state: "nodes_pb2.NodeState" = nodes_pb2.NODE_STATE_IDLE
    lost: bool = False

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.host})"


class Leader(nodes_pb2_grpc.NodesServicer):
    """The followers of one generation, and their gRPC service. `on_lost` is called once, with the first loss;
    `on_drain` whenever a follower says that it was asked to stop."""

    on_lost: Callable[[EngineDied], None]
    on_drain: Callable[[], None]
    """Both are set before followers can join."""

    def __init__(self, generation: str, place: Place, engine: str, engine_release: str, lost_after_s: float) -> None:
        self.generation = generation
        self.place = place
        self.lost_after_s = lost_after_s
        self._software = (engine, engine_release)
        self._followers: dict[int, _Follower] = {}
        self._order = nodes_pb2.NodeBeatResponse(order=1, kind=nodes_pb2.NODE_ORDER_IDLE)
        self._changed = asyncio.Condition()
        """Notified of each new order, and of each change of a follower."""
        self._complete = False
        """All followers have joined: from now on the loss of one ends this generation."""
        self._starting: asyncio.Future[None] | None = None
        """Fails if a follower cannot start its share of the engine."""
        self._loss: NodeLost | None = None
        self._spec = ""

    # What followers call.

    async def Join(self, request: nodes_pb2.JoinNodesRequest, context: Context) -> nodes_pb2.JoinNodesResponse:
        """Makes the caller a node of this generation. Raises InvalidState if its settings differ from the leader's,
        Unavailable if this generation ends."""
        self._check(request)
        known = self._followers.get(request.node_rank)
        if known is None or known.life != request.life:
            if known is not None and self._complete:
                self._lose(known, f"it has ended: a new process on {request.host} asks for its place.")
            if self._loss is not None or self._ending:
                raise Unavailable("this generation of the replica ends.", "join the next one.")
            follower = self._followers[request.node_rank] = _Follower(request.node_rank, request.host, request.life)
            log.info("node joined", node=follower.name, joined=len(self._followers), of=self.place.nodes - 1)
            await self._notify()
        return nodes_pb2.JoinNodesResponse(generation=self.generation, lost_after_s=self.lost_after_s)

    def _check(self, request: nodes_pb2.JoinNodesRequest) -> None:
        node = f"node {request.node_rank} ({request.host})"
        if request.protocol_version != PROTOCOL_VERSION:
            what = f"{node} speaks protocol {request.protocol_version}, node 0 {PROTOCOL_VERSION}."
            raise InvalidState(what, "run the same release of millrace everywhere.")
        if request.nodes != self.place.nodes or not 0 < request.node_rank < self.place.nodes:
            what = f"{node} is one of {request.nodes} nodes, and node 0 is one of {self.place.nodes}."
            raise InvalidState(what, "give all nodes the same --nodes, and each its own --node-rank.")
        if (request.engine, request.engine_release) != self._software:
            ours = " ".join(self._software)
            what = f"{node} has {request.engine} {request.engine_release}, node 0 {ours}."
            raise InvalidState(what, "install the same release of the same engine on all nodes.")

    async def Beat(self, request: nodes_pb2.NodeBeatRequest, context: Context) -> nodes_pb2.NodeBeatResponse:
        """Notes that a follower is alive; answers the order that holds. Raises Fenced for what is no node of this
        generation."""
        follower = self._followers.get(request.node_rank)
        if request.generation != self.generation or follower is None or follower.life != request.life:
            what = f"node {request.node_rank} of generation {request.generation} is no node of {self.generation}."
            raise Fenced(what, "join this generation.")
        follower.heard = time.monotonic()
        follower.order, follower.state = request.order, request.state
        if request.draining:
            self.on_drain()
        if request.order == self._order.order and request.state == nodes_pb2.NODE_STATE_FAILED:
            self._failed(follower, request)
        await self._notify()
        if request.order < self._order.order or self._ending:
            return self._order
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                await self._changed.wait_for(lambda: request.order < self._order.order)
            return self._order
        except TimeoutError:
            return nodes_pb2.NodeBeatResponse(order=self._order.order, kind=self._order.kind)

    def _failed(self, follower: _Follower, request: nodes_pb2.NodeBeatRequest) -> None:
        if self._starting is not None and not self._starting.done():
            kind = InvalidJob if request.invalid_job else Unavailable
            self._starting.set_exception(kind(f"{follower.name}: {request.failure}", request.fix))
        elif self._order.kind == nodes_pb2.NODE_ORDER_RUN:
            self._lose(follower, request.failure)

    # What the replica does.

    async def whole(self, within_s: float) -> None:
        """Waits until all followers have joined. Raises Unavailable if they do not in time."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: not self._missing)
                self._complete = True
        except TimeoutError as error:
            what = f"{_nodes(self._missing)} of {self.place.nodes} have not joined within {within_s:g} s."
            fix = f"start them with --leader {self.place.address} --nodes {self.place.nodes} and their --node-rank."
            raise Unavailable(what, fix) from error
        log.info("all nodes have joined", nodes=self.place.nodes, hosts=self.hosts, generation=self.generation)

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.place.nodes) if rank not in self._followers]

    @property
    def hosts(self) -> list[str]:
        """The hosts of the followers."""
        return [self._followers[rank].host for rank in sorted(self._followers)]

    async def watch(self) -> None:
        """Looks whether the followers are alive, until cancelled or one is lost."""
        every_s = self.lost_after_s / LOOKS
        while self._loss is None:
            slept = time.monotonic()
            await asyncio.sleep(every_s)
            now = time.monotonic()
            if now - slept > 2 * every_s:
                continue  # this process stood still: beats that have come are carried out first
            for follower in list(self._followers.values()):
                if (silent_s := now - follower.heard) <= self.lost_after_s:
                    continue
                if self._complete:
                    self._lose(follower, f"it has not answered for {silent_s:.1f} s.")
                else:
                    log.warning("node has not answered and has to join again", node=follower.name)
                    del self._followers[follower.rank]

    async def silent(self) -> list[str]:
        """Names of the followers from which nothing comes any more. Waits for a beat of each, for HEARD_S at most."""
        asked, followers = time.monotonic(), list(self._followers.values())

        def heard(follower: _Follower) -> bool:
            return follower.heard > asked

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S), self._changed:
                await self._changed.wait_for(lambda: all(heard(each) or each.lost for each in followers))
        return [each.name for each in followers if not heard(each)]

    def serve_job(self, spec: str) -> None:
        """The job spec, as the coordinator sent it, that the followers start their workers for: each host has its own
        paths of what is named on the hub."""
        self._spec = spec

    async def start(self, worker_rpc: str) -> EngineStart:
        """Tells the followers to start their share of the engine; what the leader starts its own with."""
        self._check_alive()
        self._starting = asyncio.get_running_loop().create_future()
        host, port, seed = host_address(), free_port(), secrets.randbits(30)
        order = nodes_pb2.NodeBeatResponse(
            kind=nodes_pb2.NODE_ORDER_RUN, spec=self._spec, host=host, port=port, seed=seed, worker_rpc=worker_rpc
        )
        await self._give(order)
        return EngineStart(0, self.place.nodes, host, port, seed, worker_rpc)

    async def or_failure(self, building: Awaitable[Result], give_up: Callable[[], None]) -> Result:
        """The result of `building`, by which the leader starts its share. Raises the error of a follower that cannot
        start its own, after `give_up` has ended `building`."""
        assert self._starting is not None
        starting, task = self._starting, asyncio.ensure_future(building)
        try:
            either: list[asyncio.Future[Any]] = [task, starting]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            while not task.done():
                give_up()  # again: processes may have been started since
                await asyncio.wait({task}, timeout=WAIT_S)
            if starting.done():
                await asyncio.gather(task, return_exceptions=True)  # how it ended is of no interest
                starting.result()
            return task.result()
        except BaseException:
            # What the leader cannot start, followers cannot either: their failures are not the loss of a node.
            await self._give(nodes_pb2.NodeBeatResponse(kind=nodes_pb2.NODE_ORDER_IDLE))
            raise
        finally:
            self._starting = None
            starting.cancel()

    async def stop(self) -> None:
        """Tells the followers to end their workers, and waits until they have."""
        if self._ending:
            return
        if self._order.kind == nodes_pb2.NODE_ORDER_RUN:
            await self._give(nodes_pb2.NodeBeatResponse(kind=nodes_pb2.NODE_ORDER_IDLE))
        try:
            async with asyncio.timeout(IDLE_S), self._changed:
                await self._changed.wait_for(lambda: self._loss is not None or all(map(self._idle, self._followers)))
        except TimeoutError:
            log.warning("nodes have not ended their workers", seconds=IDLE_S)

    def _idle(self, rank: int) -> bool:
        follower = self._followers[rank]
        return follower.order == self._order.order and follower.state == nodes_pb2.NODE_STATE_IDLE

    async def end(self, reason: str, *, for_good: bool) -> None:
        """Tells the followers that this generation ends, and waits a moment until they know. `for_good`: they end and
        do not come back."""
        kind = nodes_pb2.NODE_ORDER_LEAVE if for_good else nodes_pb2.NODE_ORDER_REJOIN
        await self._give(nodes_pb2.NodeBeatResponse(kind=kind, reason=reason))
        number = self._order.order
        try:
            async with asyncio.timeout(LEAVE_S), self._changed:
                await self._changed.wait_for(
                    lambda: all(each.lost or each.order == number for each in self._followers.values())
                )
        except TimeoutError:
            log.warning("nodes have not heard that the replica ends", seconds=LEAVE_S)

    @property
    def _ending(self) -> bool:
        return self._order.kind in (nodes_pb2.NODE_ORDER_LEAVE, nodes_pb2.NODE_ORDER_REJOIN)

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise NodeLost(self._loss.what, self._loss.fix) from self._loss

    def _lose(self, follower: _Follower, why: str) -> None:
        """This generation ends: a follower is lost. `why` ends with a full stop."""
        if self._loss is not None or self._ending:
            return
        follower.lost = True
        self._loss = NodeLost(f"{follower.name} of the replica is lost: {why}", f"see the log of {follower.host}.")
        log.error("a node is lost, and the replica with it", node=follower.name, why=why)
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(NodeLost(self._loss.what, self._loss.fix))
        self.on_lost(self._loss)

    async def _give(self, order: nodes_pb2.NodeBeatResponse) -> None:
        order.order = self._order.order + 1
        self._order = order
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _nodes(ranks: list[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def servicers(leader: Leader) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
    """The leader's service by its full name, for `millrace.wire.server.Server`."""
    return {"millrace.v1.Nodes": lambda server: nodes_pb2_grpc.add_NodesServicer_to_server(leader, server)}


async def meet(nodes: Leader, replica: FleetMember, stops: asyncio.Queue[int], patience_s: float) -> bool:
    """Waits until all followers have joined; False if this process was asked to stop first. Raises Unavailable if they
    do not join within `patience_s`."""

    def drain() -> None:
        note_drained()  # without this follower the replica cannot come back
        replica.drain()

    nodes.on_lost, nodes.on_drain = replica.died_of, drain
    whole = asyncio.create_task(nodes.whole(patience_s))
    others = [asyncio.create_task(stops.get()), asyncio.create_task(replica.draining.wait())]
    await asyncio.wait({whole, *others}, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    if not whole.done():
        whole.cancel()
        return False
    whole.result()
    return True


async def build_on_nodes(
    nodes: Leader | None,
    place: str,
    thread: Executor,
    build: Callable[[EngineStart | None], Result],
    give_up: Callable[[], None],
) -> Result:
    """What `build` returns in `thread`, once all processes of the engine on all nodes have started. `place`: where the
    workers find this replica. Raises what `build` raises, and as `Leader.or_failure`."""
    loop = asyncio.get_running_loop()
    if nodes is None:
        return await loop.run_in_executor(thread, build, None)
    start = await nodes.start(place)
    return await nodes.or_failure(loop.run_in_executor(thread, build, start), give_up)
