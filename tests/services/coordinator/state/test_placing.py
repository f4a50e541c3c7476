"""Which queued job runs where, and what the others wait for."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millrace.rest import JobState, WaitingFor
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.spec.pool import ROLLOUT
from services.coordinator.state.job import JobRecord
from services.coordinator.state.waiting import (
    Place,
    Preemption,
    Quota,
    Turn,
    next_for,
    places_for,
    preempted_by,
    waits_for_turn,
)
from tests.services.coordinator.redis import a_job

RUNNING = replace(a_job(1), state=JobState.RUNNING, user="ann")
QUEUED, LATER = a_job(2), a_job(3)


def place(name: str = DEFAULT_PARTITION, running: JobRecord | None = None, *pools: str, trainer: bool = True) -> Place:
    return Place(name, Turn(running), trainer, {ROLLOUT, *pools} if trainer else ())


def why(job: JobRecord, *places: Place, quota: int = 0) -> tuple[WaitingFor, str] | None:
    found = waits_for_turn(job, places, Quota(quota))
    return None if found is None else (found.reason, found.message)


def chosen(name: str, jobs: list[JobRecord], *places: Place, quota: int = 0) -> JobRecord | None:
    active = [each.turn.running for each in places if each.turn.running is not None]
    return next_for(name, jobs, active, places, Quota(quota))


def test_the_only_partition_takes_jobs_in_the_order_of_submission() -> None:
    for only in (place(), place(trainer=False)):
        assert chosen(DEFAULT_PARTITION, [LATER, QUEUED], only) is QUEUED
        assert chosen(DEFAULT_PARTITION, [replace(LATER, pools="quality")], only) is not None, (
            "it starts, and waits for the pool"
        )


def test_a_queued_job_names_the_job_whose_turn_comes_first() -> None:
    assert why(replace(QUEUED, user="ann"), place(running=RUNNING, trainer=False)) == (
        WaitingFor.EARLIER_JOB,
        f"its turn comes after {RUNNING.id} (sums)",
    )
    assert why(replace(QUEUED, user="bob"), place(running=RUNNING)) == (
        WaitingFor.EARLIER_JOB,
        "its turn comes after a job of another user",
    )
    first = Place(DEFAULT_PARTITION, Turn(None, QUEUED), has_trainer=True)
    assert why(LATER, first) == (WaitingFor.EARLIER_JOB, f"its turn comes after {QUEUED.id} (sums)")
    assert why(QUEUED, first) is None and why(QUEUED, place()) is None, "they are about to start"


def test_a_queued_job_waits_for_a_trainer_where_it_may_run() -> None:
    assert why(QUEUED, place(trainer=False)) == (WaitingFor.TRAINER, "no trainer is connected")
    there = replace(QUEUED, wanted_partition="b")
    expected = (WaitingFor.TRAINER, "no trainer is connected to the partition b")
    assert why(there, place()) == why(there, place(), place("b", trainer=False)) == expected
    assert why(there, place(), place("b")) is None
    assert why(QUEUED, place(trainer=False), place("b", RUNNING)) is not None, "the empty partition is none for it"
    assert why(QUEUED, place(trainer=False), place("b")) is None


def test_a_job_runs_where_all_members_are_that_it_needs() -> None:
    judged, places = replace(QUEUED, pools="quality"), [place("a"), place("b", RUNNING, "quality")]
    assert [each.name for each in places_for(judged, places)] == ["b"], "it waits for b, although a is free"
    assert chosen("a", [judged, LATER], *places) is LATER
    assert [each.name for each in places_for(judged, places[:1])] == ["a"]
    wanted = replace(judged, wanted_partition="a")
    assert chosen("a", [wanted], *places) is wanted and chosen("b", [wanted], *places) is None


def test_a_job_that_is_continued_goes_back_to_its_trainer() -> None:
    again = replace(QUEUED, partition="b")
    assert (
        chosen("a", [again], place("a"), place("b")) is None and chosen("b", [again], place("a"), place("b")) is again
    )
    assert chosen("a", [again], place("a"), place("b", RUNNING)) is again, "b is busy"
    assert chosen("a", [again], place("a"), place("b", trainer=False)) is again, "b has lost its trainer"


def test_priority_comes_before_fairness_and_fairness_before_order() -> None:
    ann, bob = replace(QUEUED, user="ann"), replace(LATER, user="bob")
    places = [place("a", RUNNING), place("b")]
    assert chosen("b", [ann, bob], *places) is bob, "ann has an active job"
    assert chosen("b", [urgent := replace(ann, priority=1), bob], *places) is urgent
    assert chosen("b", [ann, replace(bob, priority=-1)], *places) is ann


def test_a_job_beyond_the_quota_of_its_user_waits_and_holds_up_nobody() -> None:
    ann, bob = replace(QUEUED, user="ann", priority=5), replace(LATER, user="bob")
    places = [place("a", RUNNING), place("b")]
    assert chosen("b", [ann, bob], *places, quota=1) is bob and chosen("b", [ann], *places, quota=1) is None
    assert why(ann, *places, quota=1) == (WaitingFor.QUOTA, "ann has as many active jobs as one user may have: 1")
    assert chosen("b", [ann, bob], *places, quota=2) is ann
    nobodys = replace(RUNNING, user="")
    assert chosen("b", [QUEUED], place("a", nobodys), place("b"), quota=1) is QUEUED, (
        "jobs without a user count for none"
    )


JOBS = st.builds(
    lambda n, user, wants, before, priority, pools: replace(
        a_job(n), user=user, wanted_partition=wants, partition=before, priority=priority, pools=pools
    ),
    st.integers(2, 9),
    st.sampled_from(["", "ann", "bob"]),
    st.sampled_from(["", "", "a", "b"]),
    st.sampled_from(["", "a", "b"]),
    st.integers(-1, 1),
    st.sampled_from(["", "quality"]),
)
PLACES = st.tuples(
    *(
        st.builds(
            lambda running, trainer, pools, name=name: Place(name, Turn(running), trainer, pools),
            st.sampled_from([None, RUNNING]),
            st.booleans(),
            st.sets(st.sampled_from([ROLLOUT, "quality"])),
        )
        for name in (DEFAULT_PARTITION, "a", "b")
    )
)


@given(st.lists(JOBS, max_size=5, unique_by=lambda job: job.id), PLACES, st.integers(0, 2))
def test_exactly_those_jobs_wait_for_nothing_that_start_now(
    jobs: list[JobRecord], places: tuple[Place, ...], quota: int
) -> None:
    free = [each for each in places if each.turn.running is None]
    seen = [replace(e, turn=Turn(None, chosen(e.name, jobs, *places, quota=quota))) if e in free else e for e in places]
    starts = {each.turn.waiting.id for each in seen if each.turn.waiting is not None and each.has_trainer}
    for job in jobs:
        assert (why(job, *seen, quota=quota) is None) == (job.id in starts)


LOW = replace(RUNNING, partition="a", priority=1, since_s=100.0, started_step=3, step=4)
ASKS = replace(QUEUED, priority=5, preempt=1)
NOW = 700.0
"""Ten minutes after LOW started."""


def stops(job: JobRecord, *places: Place, name: str = "a", quota: int = 0, after_s: float = 600.0) -> JobRecord | None:
    active = [each.turn.running for each in places if each.turn.running is not None]
    return preempted_by(name, [LATER, job], active, places, Quota(quota), Preemption(after_s), NOW)


def test_a_job_gives_way_to_the_next_one_if_that_asks_and_has_a_higher_priority() -> None:
    here = place("a", LOW)
    assert stops(ASKS, here) is ASKS
    assert stops(replace(ASKS, preempt=0), here) is None and stops(replace(ASKS, priority=1), here) is None
    assert stops(ASKS, here, after_s=0.0) is None, "the coordinator does not allow it"
    assert stops(replace(ASKS, wanted_partition="b"), here) is None
    assert stops(ASKS, here, place("b")) is None, "b is free"
    assert stops(ASKS, here, place("b", trainer=False)) is ASKS
    assert stops(replace(ASKS, pools="quality"), here, place("b", None, "quality")) is None
    first = replace(LATER, priority=6)
    assert preempted_by("a", [ASKS, first], [LOW], [here], Quota(), Preemption(600.0), NOW) is None, "not its turn"


def test_a_job_does_not_give_way_before_it_has_run_for_a_while_and_trained_a_step() -> None:
    for spared in (
        replace(LOW, since_s=101.0),
        replace(LOW, step=3),
        replace(LOW, state=JobState.PAUSED),
        replace(LOW, state=JobState.STARTING),
    ):
        assert stops(ASKS, place("a", spared)) is None


def test_one_job_gives_way_the_one_of_the_lowest_priority_that_started_last() -> None:
    lower = replace(LOW, id=a_job(7).id, partition="b", priority=0)
    assert stops(ASKS, place("a", LOW), place("b", lower)) is None
    assert stops(ASKS, place("a", LOW), place("b", lower), name="b") is ASKS
    spared = replace(lower, step=3)
    assert stops(ASKS, place("a", LOW), place("b", spared)) is ASKS
    older = replace(lower, priority=1, since_s=50.0)
    assert stops(ASKS, place("a", LOW), place("b", older)) is ASKS
    assert stops(ASKS, place("a", LOW), place("b", older), name="b") is None


def test_a_quota_is_kept_when_a_job_gives_way() -> None:
    own, other = replace(ASKS, user="ann"), replace(LOW, id=a_job(7).id, user="ann", partition="b", priority=9)
    assert stops(own, place("a", LOW), quota=1) is own, "the user's own job"
    assert stops(own, place("a", replace(LOW, user="bob")), place("b", other), quota=1) is None
