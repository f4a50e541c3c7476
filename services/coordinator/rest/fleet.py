"""/v1/fleet: who is there, and asking a member to go."""

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
        """Trainers and rollout replicas with their states, weight versions and load; those lost a while ago too."""
        return fleet.view(await queue.held())

    @router.post("/{member_id}/drain", responses=error_responses({404: "No such member."}))
    async def drain(member_id: str) -> MemberView:
        """No new leases to this member: it finishes what it holds and leaves the fleet. Idempotent."""
        member = await fleet.drain(member_id)
        held = await queue.held()
        return member.view(held.get(MemberId(member_id), 0))

    return router
