"""The processes of a replica's nodes: how the leader waits for the others, and how a follower lives and ends."""

import asyncio

from millrace.wire.channel import Peer
from millrace.wire.membership import note_drained
from services.rollout.member.member import CLOSE_S, FleetMember
from services.rollout.nodes.follower import Follower, FollowerEnd, create
from services.rollout.nodes.leader import LEAVE_S, Leader
from services.rollout.nodes.place import Place


async def meet(nodes: Leader, replica: FleetMember, stops: asyncio.Queue[int], patience_s: float) -> bool:
    """Waits until all followers have joined; False where this process was told to stop first. Raises Unavailable where
    they do not join within `patience_s`."""

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
