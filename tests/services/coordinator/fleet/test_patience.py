"""Heartbeats of fleets of all sizes, and who counts as lost."""

import asyncio
import time
from typing import Any

import pytest

from millrace.contracts.v1 import fleet_pb2
from millrace.ids import MemberId
from millrace.wire.channel import PROTOCOL_VERSION
from services.coordinator.fleet import fleet as fleet_module
from services.coordinator.fleet.fleet import PROBES_AT_ONCE, Fleet
from services.coordinator.state.member import HEARTBEATS_PER_S, LONGEST_HEARTBEAT_S, Patience, Pulse
from services.coordinator.store import Store
from tests.services.coordinator.redis import with_store


@pytest.mark.parametrize("members", [0, 1, 10, 100, 250, 1000, 100_000])
def test_heartbeats_get_rarer_and_more_silence_is_allowed(members: int) -> None:
    small = Patience(1.0, 5.0)
    now, larger = small.of_fleet(members), small.of_fleet(members + 100)
    assert small.heartbeat_s <= now.heartbeat_s <= larger.heartbeat_s <= LONGEST_HEARTBEAT_S
    assert members / now.heartbeat_s <= HEARTBEATS_PER_S or now.heartbeat_s == LONGEST_HEARTBEAT_S
    assert small.lost_after_s <= now.lost_after_s <= 5.0 * now.heartbeat_s and now.lost_after_s >= 2 * now.heartbeat_s


def test_a_longer_interval_of_the_operator_stays() -> None:
    assert Patience(30.0, 100.0).of_fleet(1000) == Patience(30.0, 100.0)


def _registration(number: int) -> fleet_pb2.RegisterRequest:
    return fleet_pb2.RegisterRequest(
        member_id=f"rollout-{number}",
        kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
        address=f"127.0.0.1:{number + 1}",
        protocol_version=PROTOCOL_VERSION,
    )


def test_a_member_is_lost_by_the_interval_that_it_was_told(redis_url: str) -> None:
    """A fleet that shrinks, or a coordinator that starts again, does not lose those that send heartbeats rarely."""

    async def scenario(store: Store) -> None:
        fleet = Fleet(store, Patience(0.01, 0.05))
        for number in range(3):
            await fleet.register(_registration(number))
        member = fleet.member("rollout-0")
        assert member.lost_after_s == fleet.patience.of_fleet(1).lost_after_s
        fleet.heartbeat(fleet_pb2.HeartbeatRequest(member_id=member.id))
        assert member.lost_after_s == fleet.patience_now.lost_after_s
        again = Fleet(store, fleet.patience)
        await again.load()
        assert again.member("rollout-0").lost_after_s == again.patience.of_fleet(3).lost_after_s

    with_store(redis_url, scenario)


def test_requests_and_answers_are_signs_of_life(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        fleet = Fleet(store, Patience())
        await fleet.register(_registration(0))
        member = fleet.member("rollout-0")
        member.pulse = Pulse(at=time.monotonic() - 60.0)
        assert member.silent_s >= 60.0
        fleet.heard(member.id)
        assert member.silent_s < 60.0
        fleet.heard(MemberId("rollout-unknown"))

    with_store(redis_url, scenario)


def test_not_all_silent_members_are_looked_for_at_a_time(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[str] = []
    everybody = asyncio.Event()

    async def scenario(store: Store) -> None:
        fleet = Fleet(store, Patience(0.02, 1.0))
        for number in range(PROBES_AT_ONCE + 8):
            await fleet.register(_registration(number))

        async def reachable(member: Any) -> str:
            looked_for.append(member.id)
            if len(set(looked_for)) == PROBES_AT_ONCE + 8:
                everybody.set()
            return ""

        monkeypatch.setattr(fleet, "_unreachable", reachable)
        monkeypatch.setattr(fleet_module, "HUNG_AFTER", 1e9)
        for number in range(PROBES_AT_ONCE + 8):
            fleet.member(f"rollout-{number}").lost_after_s = 0.0
        watching = asyncio.create_task(fleet.watch())
        await asyncio.wait_for(everybody.wait(), 60)
        watching.cancel()
        assert len(set(looked_for[:PROBES_AT_ONCE])) == PROBES_AT_ONCE
        assert set(looked_for[PROBES_AT_ONCE : 2 * PROBES_AT_ONCE]) >= {
            f"rollout-{PROBES_AT_ONCE + n}" for n in range(8)
        }

    with_store(redis_url, scenario)
