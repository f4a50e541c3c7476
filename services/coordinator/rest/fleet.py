"""/v1/fleet: listing the members, draining one, and the newest lines of its log."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query

from millrace.contracts.methods import LogsRpc
from millrace.contracts.v1 import logs_pb2
from millrace.ids import MemberId
from millrace.rest import FleetView, LogLineView, LogView, MemberView
from millrace.telemetry.logs import MOST_LINES, TAIL, LogLine
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.rest.schema import Guards, error_responses, subject
from services.coordinator.work.queue import Queues

COORDINATOR = "coordinator"
"""Names the coordinator itself if a member's id is asked for."""


def routes(guards: Guards, fleet: Fleet, queues: Queues) -> APIRouter:
    router = subject("/v1/fleet", "fleet", guards)

    @router.get("")
    async def show() -> FleetView:
        """Trainers and rollout replicas with their states, weight versions and load; and those lost recently."""
        return fleet.view(await queues.held())

    @router.post("/{member_id}/drain", responses=error_responses({404: "No such member."}))
    async def drain(member_id: str) -> MemberView:
        """Gives this member no new leases: it finishes those that it holds and leaves the fleet. Idempotent."""
        member = await fleet.drain(member_id)
        held = await queues.held()
        return member.view(held.get(MemberId(member_id), 0))

    @router.get(
        "/{member_id}/log",
        responses=error_responses(
            {
                404: "No such member.",
                409: "The member runs a release that does not serve its log.",
                503: "The member did not answer within 5 s.",
            }
        ),
    )
    async def log(
        member_id: str, lines: Annotated[int, Query(ge=1, le=MOST_LINES, description="How many.")] = MOST_LINES
    ) -> LogView:
        """The newest lines that a member has logged, or the coordinator itself if the id is `coordinator`. Output of
        its child processes, such as an engine's, and of a trainer's ranks other than 0 is not among them."""
        if member_id == COORDINATOR:
            return _log_view(member_id, TAIL.newest(lines))
        answer = await fleet.call(fleet.member(member_id), LogsRpc.Tail, logs_pb2.TailLogRequest(lines=lines))
        return _log_view(member_id, answer.lines)

    return router


def _log_view(member_id: str, lines: Iterable[LogLine | logs_pb2.LogLine]) -> LogView:
    views = [LogLineView(time=one.time, level=one.level, message=one.message, details=one.details) for one in lines]
    return LogView(member=member_id, lines=views)
