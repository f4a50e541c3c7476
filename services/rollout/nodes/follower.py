"""A follower: joins the leader, carries out its orders, and ends if the leader is lost."""

import asyncio
import socket
import time
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

import structlog

from millrace import hub
from millrace.contracts.methods import NodesRpc
from millrace.contracts.v1 import nodes_pb2
from millrace.descriptors import imported
from millrace.engines import ENGINES
from millrace.errors import Fenced, InvalidJob, InvalidRequest, InvalidState, MillraceError, Unavailable
from millrace.ids import new_member_id
from millrace.spec import JobSpec, received
from millrace.wire import last_words
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.membership import note_drained
from services.rollout.member.member import CLOSE_S
from services.rollout.nodes.leader import LEAVE_S
from services.rollout.nodes.place import EngineStart, Place


class EngineShare(Protocol):
    """The workers of one node. All methods are called on one event loop and do not block it."""

    async def start(self, spec: JobSpec, start: EngineStart) -> None:
        """Starts the workers, which meet those of the other nodes. Raises InvalidJob for what the job asks wrongly,
        Unavailable if they do not start, or `stop` was called meanwhile."""

    async def died(self) -> str:
        """Waits until a worker has ended by itself; says which, and how. Called once the workers have started."""

    async def stop(self) -> None:
        """Ends every process of the share, also while it starts. Idempotent."""


def create(engine: str) -> EngineShare:
    """The share of an engine that lies on several hosts. It has no workers yet."""
    share: EngineShare = imported(ENGINES[engine].follower)()
    return share


log = structlog.get_logger(__name__)
RETRY_S = 0.5
"""Time between two calls of a leader that does not answer."""


class FollowerEnd(Enum):
    """Why a follower ends."""

    FOR_GOOD = auto()
    """The replica has left the fleet in order, or this follower was asked twice to stop."""
    REJOIN = auto()
    """This generation has ended: the next one is joined by a new process."""


@dataclass(frozen=True)
class _Report:
    """What the next beat says."""

    order: int = 0
    state: "nodes_pb2.NodeState" = nodes_pb2.NODE_STATE_IDLE
    failure: MillraceError | None = None
    draining: bool = False


class Follower:
    """One life of a follower. It belongs to one generation: it never joins a second one."""

    def __init__(self, leader: Peer, place: Place, engine: tuple[str, str], share: EngineShare) -> None:
        """`engine` is the engine's name and release."""
        self._leader = leader
        self._place = place
        self._engine = engine
        self._share = share
        self._life = new_member_id("rollout")
        self._generation = ""
        self._lost_after_s = 0.0
        self._report = _Report()
        self._changed = asyncio.Event()
        """Set when the report has changed, so that the leader hears of it at once."""
        self._work: asyncio.Task[None] | None = None

    @property
    def joined(self) -> bool:
        return bool(self._generation)

    def drain(self) -> None:
        """This node was asked to stop: the whole replica drains. Idempotent."""
        self._say(draining=True)

    async def run(self, patience_s: float) -> FollowerEnd:
        """Joins within `patience_s`, then follows until the generation ends. Raises InvalidState if the leader
        refuses this node, Unavailable if it cannot be reached in time."""
        await self._join(patience_s)
        try:
            return await self._follow()
        finally:
            if self._work is not None:
                self._work.cancel()
            await self._share.stop()

    async def _join(self, patience_s: float) -> None:
        name, release = self._engine
        request = nodes_pb2.JoinNodesRequest(
            node_rank=self._place.rank,
            nodes=self._place.nodes,
            life=self._life,
            host=socket.gethostname(),
            protocol_version=PROTOCOL_VERSION,
            engine=name,
            engine_release=release,
        )
        since = time.monotonic()
        while True:
            try:
                joined = await self._leader.call(NodesRpc.Join, request)
                break
            except (InvalidState, InvalidRequest):
                raise
            except MillraceError as error:
                waited_s = time.monotonic() - since
                if waited_s > patience_s:
                    what = f"node 0 at {self._place.address} has not answered for {waited_s:.0f} s: {error.what}"
                    raise Unavailable(what, "start it, or give its address with --leader.") from error
                log.info("waiting for node 0", leader=self._place.address, error=str(error))
            await asyncio.sleep(RETRY_S)
        self._generation, self._lost_after_s = joined.generation, joined.lost_after_s
        last_words.joined(self._life)
        log.info("joined", leader=self._place.address, generation=self._generation)

    async def _follow(self) -> FollowerEnd:
        heard = time.monotonic()
        while True:
            if self._work is not None and self._work.done() and not self._work.cancelled():
                self._work.result()  # raises what nobody expected
            left_s = heard + self._lost_after_s - time.monotonic()
            if left_s <= 0:
                log.error("node 0 is lost", leader=self._place.address, silent_s=self._lost_after_s)
                return FollowerEnd.REJOIN
            try:
                answer = await self._beat(left_s)
            except Fenced as error:
                log.error("this generation has ended", generation=self._generation, error=str(error))
                return FollowerEnd.REJOIN
            except MillraceError as error:
                log.warning("node 0 does not answer", error=str(error))
                await asyncio.sleep(min(RETRY_S, left_s))
                continue
            heard = time.monotonic()
            if answer is not None and answer.order > self._report.order:
                self._say(order=answer.order, state=nodes_pb2.NODE_STATE_STARTING, failure=None)
                if answer.kind in (nodes_pb2.NODE_ORDER_LEAVE, nodes_pb2.NODE_ORDER_REJOIN):
                    return await self._end(answer)
                self._work = asyncio.create_task(self._carry_out(answer, self._work))

    async def _beat(self, within_s: float) -> nodes_pb2.NodeBeatResponse | None:
        """The leader's answer; None if the report changed while it was waited for. Raises MillraceError."""
        self._changed.clear()
        beating = asyncio.ensure_future(self._leader.call(NodesRpc.Beat, self._message()))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({beating, changed}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                return beating.result()
            if changed.done():
                return None
            raise Unavailable(f"{self._place.address} has not answered in time.")
        finally:
            beating.cancel()
            changed.cancel()

    def _message(self) -> nodes_pb2.NodeBeatRequest:
        report = self._report
        message = nodes_pb2.NodeBeatRequest(
            generation=self._generation,
            life=self._life,
            node_rank=self._place.rank,
            order=report.order,
            state=report.state,
            draining=report.draining,
        )
        if report.failure is not None:
            message.failure, message.fix = report.failure.what, report.failure.fix
            message.invalid_job = isinstance(report.failure, InvalidJob)
        return message

    async def _carry_out(self, order: nodes_pb2.NodeBeatResponse, before: asyncio.Task[None] | None) -> None:
        """Brings the share to what `order` wants. What `before` is still about is given up."""
        if before is not None:
            before.cancel()
        await self._share.stop()
        if order.kind != nodes_pb2.NODE_ORDER_RUN:
            self._of(order, nodes_pb2.NODE_STATE_IDLE)
            return
        start = EngineStart(self._place.rank, self._place.nodes, order.host, order.port, order.seed, order.worker_rpc)
        try:
            await self._share.start(await asyncio.to_thread(hub.local, received(order.spec)), start)
            self._of(order, nodes_pb2.NODE_STATE_RUNNING)
            raise Unavailable(await self._share.died(), "see its log above.")
        except MillraceError as error:
            log.error("this node's share of the engine failed", error=str(error))
            self._of(order, nodes_pb2.NODE_STATE_FAILED, error)

    def _of(
        self, order: nodes_pb2.NodeBeatResponse, state: "nodes_pb2.NodeState", failure: MillraceError | None = None
    ) -> None:
        """Says how far `order` is, unless it has been replaced by a newer one."""
        if order.order == self._report.order:
            self._say(state=state, failure=failure)

    def _say(self, **changes: object) -> None:
        self._report = replace(self._report, **changes)  # type: ignore[arg-type]
        self._changed.set()

    async def _end(self, order: nodes_pb2.NodeBeatResponse) -> FollowerEnd:
        """Lets the leader know that the order has come."""
        try:
            await self._leader.call(NodesRpc.Beat, self._message())
        except MillraceError as error:
            log.info("node 0 has ended already", error=str(error))
        for_good = order.kind == nodes_pb2.NODE_ORDER_LEAVE
        log.info("the replica ends", reason=order.reason, for_good=for_good)
        return FollowerEnd.FOR_GOOD if for_good else FollowerEnd.REJOIN


async def follow(
    place: Place, engine: tuple[str, str], stops: asyncio.Queue[int], patience_s: float, drain_s: float
) -> int:
    """One follower from start to end; returns the exit status. `engine` is its name and release. A first signal drains
    the replica, a second one, or `drain_s` after the first, ends this node. Raises as `Follower.run`."""
    leader = Peer(place.address)
    follower = Follower(leader, place, engine, create(engine[0]))
    running = asyncio.create_task(follower.run(patience_s))
    try:
        if await _ended(running, stops, None):
            return _status(running.result())
        follower.drain()
        if follower.joined and await _ended(running, stops, drain_s + CLOSE_S + LEAVE_S):
            return _status(running.result())
        return 0
    finally:
        running.cancel()
        await asyncio.wait({running})
        await leader.close()


async def _ended(running: asyncio.Task[FollowerEnd], stops: asyncio.Queue[int], within_s: float | None) -> bool:
    """Whether the follower has ended before the next signal, and in time."""
    stopping = asyncio.create_task(stops.get())
    await asyncio.wait({running, stopping}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return running.done()


def _status(end: FollowerEnd) -> int:
    if end is FollowerEnd.FOR_GOOD:
        note_drained()
        return 0
    return 1
