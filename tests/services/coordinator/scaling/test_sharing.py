"""Replicas that running jobs share: what each is due, what is handed over, and that it settles."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millrace.events import HandOverReason
from services.coordinator.scaling.sharing import Claim, due, moves

A = Claim("a", 1.0, 4, 4, 100)
B = Claim("b", 1.0, 0, 0, 100)
FIRST, SHARE, DEMAND = HandOverReason.FIRST, HandOverReason.SHARE, HandOverReason.DEMAND


def test_each_job_is_due_its_share_of_all_replicas() -> None:
    assert due([A, B], 0) == {"a": 2, "b": 2} and due([A], 3) == {"a": 7}
    assert due([A, replace(B, share=3.0)], 0) == {"a": 1, "b": 3}
    assert due([A, replace(B, share=1000.0)], 0) == {"a": 1, "b": 3}, "one stays with each"
    assert due([replace(A, free=1), replace(B, share=3.0)], 0) == {"a": 3, "b": 1}, "three name their partition"


def test_what_a_job_has_no_work_for_goes_to_the_others() -> None:
    assert due([replace(A, wanted=1), B], 0) == {"a": 1, "b": 3}
    assert due([replace(A, wanted=1), replace(B, wanted=1)], 0) == {"a": 2, "b": 2}, "by share, as neither needs them"


def test_a_job_without_replicas_gets_one_at_once_and_the_rest_later() -> None:
    assert [(m.before, m.partition, m.count, m.reason) for m in moves([A, B], {}, ripe=False)] == [("a", "b", 1, FIRST)]
    begun = [replace(A, replicas=3, free=3), replace(B, replicas=1, free=1)]
    assert moves(begun, {}, ripe=False) == []
    assert [(m.before, m.partition, m.count, m.reason) for m in moves(begun, {}, ripe=True)] == [("a", "b", 1, SHARE)]
    assert moves([replace(A, replicas=1, free=1), B], {}, ripe=True) == [], "one stays with each"
    assert moves([replace(A, free=0), B], {}, ripe=True) == [], "all of them name their partition"


def test_replicas_of_a_partition_without_a_job_are_used() -> None:
    assert [(m.before, m.count, m.reason) for m in moves([A], {"c": 2}, ripe=True)] == [("c", 2, SHARE)]
    assert [(m.before, m.count, m.reason) for m in moves([A, B], {"c": 2}, ripe=True)] == [("c", 1, FIRST)]


def test_a_hand_over_for_demand_is_told_apart() -> None:
    two = [replace(A, replicas=2, free=2, wanted=1), replace(B, replicas=2, free=2)]
    assert [(m.before, m.partition, m.count, m.reason) for m in moves(two, {}, ripe=True)] == [("a", "b", 1, DEMAND)]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Claim], dict[str, int]]:
    claims = []
    for place in "abcd"[: draw(st.integers(1, 4))]:
        replicas = draw(st.integers(0, 6))
        free, wanted = draw(st.integers(0, replicas)), draw(st.integers(1, 12))
        claims.append(Claim(place, draw(st.sampled_from([0.5, 1.0, 2.0, 7.0])), replicas, free, wanted))
    return claims, {"z": draw(st.integers(0, 3))}


@given(fleets())
def test_hand_overs_settle_and_take_no_job_its_last_replica(fleet: tuple[list[Claim], dict[str, int]]) -> None:
    claims, idle = fleet
    total = sum(c.replicas for c in claims) + idle["z"]
    for _ in range(8):
        found = moves(claims, idle, ripe=True)
        if not found:
            break
        gone, come = Counter[str](), Counter[str]()
        for move in found:
            gone[move.before] += move.count
            come[move.partition] += move.count
        idle = {"z": idle["z"] - gone["z"]}
        for c in claims:
            assert gone[c.place] <= c.free and (not gone[c.place] or c.replicas - gone[c.place] >= 1)
        claims = [
            replace(
                c,
                replicas=c.replicas - gone[c.place] + come[c.place],
                free=c.free - gone[c.place] + come[c.place],
            )
            for c in claims
        ]
    else:
        raise AssertionError("replicas go to and fro")
    assert sum(c.replicas for c in claims) + idle["z"] == total and idle["z"] >= 0
