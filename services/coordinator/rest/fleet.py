"""/v1/fleet: listing the members, and draining one."""

from fastapi import APIRouter

from millrace.ids import MemberId
from millrace.rest import FleetView, MemberView
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.rest.schema import error_responses
from services.coordinator.work.queue import Queue


def routes(fleet: Fleet, queue: Queue) -> APIRouter:
    router = APIRouter(prefix="/v1/fleet", tags=["fleet"])

    @router.get("")
    async def show() -> FleetView:
        """Trainers and rollout replicas with their states, weight versions and load; and those lost recently."""
        return fleet.view(await queue.held())

    @router.post("/{member_id}/drain", responses=error_responses({404: "No such member."}))
    async def drain(member_id: str) -> MemberView:
        """Gives this member no new leases: it finishes those that it holds and leaves the fleet. Idempotent."""
        member = await fleet.drain(member_id)
        held = await queue.held()
        return member.view(held.get(MemberId(member_id), 0))

    return router
