"""A pool's replica as a process: from its registration to its end."""

import re

from millrace.errors import InvalidState
from millrace.spec.pool import LONGEST_NAME, NAME, ROLLOUT
from millrace.wire.channel import Peer, token
from services.rollout.engines import create_scoring
from services.rollout.member.endpoint import HttpEndpoint
from services.rollout.member.metrics import MemberMetrics
from services.rollout.member.process import MemberProcess, Reached, signals
from services.rollout.pools.endpoint import application
from services.rollout.pools.replica import PoolReplica
from services.rollout.pools.service import servicers


def check_pool_option(pool: str, engine: str, nodes: int) -> None:
    """Checks the option --pool of a replica's process. Raises NotFound and InvalidState."""
    if pool == ROLLOUT:
        return
    if re.fullmatch(NAME, pool) is None or len(pool) > LONGEST_NAME:
        fix = "use small letters, digits, _ and -, as in the job's pools."
        raise InvalidState(f"--pool: {pool}: is not the name of a pool.", fix)
    create_scoring(engine)
    if nodes > 1:
        raise InvalidState("--nodes: a replica of a pool lies on one host.", "leave it out.")


async def serve(replica: PoolReplica, reached: Reached) -> int:
    """Serves until the replica is told to stop, or its engine dies; returns the exit status. Raises MillraceError if
    the coordinator refuses the replica."""
    http = HttpEndpoint(application(replica, token()), reached.bind, reached.sessions_port)
    coordinator, metrics = Peer(reached.coordinator), MemberMetrics(replica)
    process = MemberProcess(replica, reached, coordinator, servicers(replica), metrics, http)
    await process.start()
    await process.live(signals())
    return await process.stop()
