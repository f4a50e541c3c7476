"""Publications with members that fail, hang or die in each phase, and replicas that join late."""

import asyncio
from typing import Any

import pytest

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidJob, InvalidState, PublicationFailed
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.services.coordinator.peers import SimulatedReplica

PHASES = {
    "PreparePublication": "prepare",
    "TransferPublication": "transfer",
    "VerifyPublication": "verify",
    "CommitPublication": "commit",
}
JOINED = {"TransferPublication": "prepare", "CommitPublication": "verify"}
"""The phase whose call does this one too. Of a receiver that does not answer, no more is known."""


def spoil(replica: SimulatedReplica, method: str, how: str) -> None:
    """At the publication of version 2: refuse it, die in it, or never answer; once."""

    async def fault(request: Any) -> None:
        if request.publication.version < 2:
            return
        del replica.faults[method]
        if how == "refuses":
            raise InvalidState(f"{method} went wrong.")
        if how == "dies":
            replica.dying = asyncio.create_task(replica.die())
        await asyncio.sleep(60.0)

    replica.faults[method] = fault


EARLIER = [
    pytest.param(method, how, False, marks=[] if how == "refuses" else pytest.mark.matrix)
    for method in JOINED
    for how in ("refuses", "dies", "hangs")
]
"""A replica of an earlier release, which has a call for each phase. `matrix`: one that dies or hangs is met in the same
way whatever the call is, as those of this release show."""


@pytest.mark.parametrize(
    ("method", "how", "joins_phases"),
    [(method, how, True) for method in PHASES for how in ("refuses", "dies", "hangs") if method not in JOINED]
    + [("CommitPublication", "refuses", True), ("CommitPublication", "hangs", True), *EARLIER],
)
def test_a_replica_fails_in_a_phase(
    method: str, how: str, joins_phases: bool, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        trainer, good = await cluster.trainer(step_s=0.05), await cluster.replica(seconds=0.05)
        bad = await cluster.replica(seconds=0.05)
        bad.joins_phases = joins_phases
        spec["deadlines"] = {"publication_s": 2.0 if how == "hangs" else 20.0}
        spoil(bad, method, how)
        job_id = await cluster.submit(spec)
        job = await cluster.ended(job_id)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        failures = await cluster.events(job_id, "publication.failed")
        told = JOINED[method] if joins_phases and method in JOINED and how != "refuses" else PHASES[method]
        assert [(f.data.phase, f.data.culprits) for f in failures] == [(told, [bad.id])]
        assert failures[0].data.version == 2 and bad.id in failures[0].message
        assert good.publications == list(range(7)) and trainer.stalest <= 1
        reports = await cluster.events(job_id, "publication.done")
        assert sorted({r.data.version for r in reports}) == list(range(7))
        assert set(trainer.every.values()) == {1}
        if how == "refuses" and bad.publications[-1] > 1:
            assert reports[-1].data.epoch > failures[0].data.epoch

    played(shared, spec)


NO_PLACE = InvalidJob("the engine's model has no place for q_proj.bias.", "use another engine.")


@pytest.mark.parametrize("method", ["DescribeWeights", "CommitPublication"])
def test_a_job_whose_weights_no_engine_can_take_fails_at_once(
    method: str, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    """Its replicas have accepted the job; by gather_broadcast they notice when they load the weights."""

    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        await cluster.trainer()
        for replica in [await cluster.replica(), await cluster.replica()]:
            replica.faults.once(method, NO_PLACE, times=100)
        spec["publication"] = {"path": "gather_broadcast" if method == "CommitPublication" else "sharded"}
        job_id = await cluster.submit(spec)
        job = await cluster.ended(job_id)
        assert job.state is JobState.FAILED
        assert job.failure is not None and "all 2 connected replicas refused the job: the engine's model" in job.failure
        assert job.failure.endswith("no place for q_proj.bias. Fix: use another engine.")
        refusals = [event for event in await cluster.events(job_id, "member.failed") if event.data.refused]
        assert len(refusals) == 2

    played(shared, spec)


@scenario
async def test_a_replica_that_refuses_the_weights_leaves_the_job_to_the_others(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer(), await cluster.replica()
    bad = await cluster.replica()
    bad.faults.once("DescribeWeights", NO_PLACE, times=100)
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None) and bad.publications == []
    (refusal,) = [event for event in await cluster.events(job_id, "member.failed") if event.data.refused]
    assert refusal.data.member == bad.id


@scenario
async def test_a_replica_that_was_cut_out_joins_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["schedule"]["steps"] = 10_000
    await cluster.trainer(step_s=0.15), await cluster.replica()
    bad = await cluster.replica()
    spoil(bad, "CommitPublication", "refuses")
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, bad.publications[-1:] > [2]))
    before = len(bad.leased)
    await until(lambda: asyncio.sleep(0, len(bad.leased) > before))
    assert 2 not in bad.publications
    joined = [e for e in await cluster.events(job_id, "member.joining") if bad.id in e.message]
    assert joined
    await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    await cluster.ended(job_id)


@scenario
async def test_the_trainer_names_the_culprit(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    bad = await cluster.replica()
    trainer.faults.once("TransferPublication", PublicationFailed("nothing came from it.", culprits=(bad.id,)))
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED
    (failure,) = await cluster.events(job_id, "publication.failed")
    assert failure.data.culprits == [bad.id]


@scenario
async def test_a_receiver_that_stands_still_is_named_though_only_the_sender_waits(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    trainer, good = await cluster.trainer(), await cluster.replica()
    bad = await cluster.replica()
    spec["deadlines"] = {"publication_s": 2.0}

    async def wait_for_it(request: Any) -> None:
        if bad.version == 1:
            del trainer.faults["TransferPublication"]
            bad.faults["GetStatus"] = stand_still
            await asyncio.sleep(60.0)

    async def stand_still(request: Any) -> None:
        await asyncio.sleep(60.0)

    trainer.faults["TransferPublication"] = wait_for_it
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and good.publications == list(range(7))
    (failure,) = await cluster.events(job.id, "publication.failed")
    assert (failure.data.phase, failure.data.culprits) == ("transfer", [bad.id])


@scenario
async def test_a_publication_that_nobody_is_to_blame_for_fails_the_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    spec.pop("evaluation")
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    trainer.faults.once("TransferPublication", PublicationFailed("the link is down."), times=1000)
    job = await cluster.ended(job_id)
    assert job.state is JobState.FAILED and "the link is down" in str(job.failure)
    assert len(await cluster.events(job_id, "publication.failed")) == 3


@scenario
async def test_another_plan_is_refused(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    odd = await cluster.replica()
    odd.plan_hash = b"another"
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and odd.publications == [] and odd.leased == []
    failures = await cluster.events(job.id, "publication.failed")
    assert "worked out another plan" in failures[0].message and failures[0].data.culprits == [odd.id]


@scenario
async def test_a_late_replica_gets_the_weights_before_its_first_lease(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["schedule"]["steps"] = 12
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.05)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 2)
    late = await cluster.replica(seconds=0.05)
    held_at_first: list[int] = []

    async def first(lease: Any) -> None:
        held_at_first.append(late.version)

    late.faults["Generate"] = first
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and trainer.stalest <= 1
    assert late.configured == [job_id] and late.leased and held_at_first[0] >= 2
    joining = await cluster.events(job_id, "member.joining")
    assert any(late.id in event.message for event in joining) or late.publications[0] > 2


@scenario
async def test_a_replica_that_cannot_be_configured_does_not_stop_the_job(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer(), await cluster.replica()
    broken = await cluster.replica()
    broken.faults.once("Configure", InvalidState("the engine did not start."), times=1000)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and broken.publications == []
    failures = await cluster.events(job.id, "member.failed")
    assert "the engine did not start" in failures[0].message and broken.id in failures[0].message


@scenario
async def test_all_replicas_die_and_new_ones_come(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, first = await cluster.trainer(step_s=0.05), await cluster.replica(seconds=0.05)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 2)
    await first.die()
    await until(lambda: cluster.events(job_id, "member.out"))
    assert (await cluster.job(job_id)).state is JobState.RUNNING
    await cluster.replica()
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and set(trainer.every.values()) == {1}


@pytest.mark.parametrize("chosen", ["auto", "gather_broadcast", "sharded"])
def test_the_path_follows_the_jobs_choice_and_what_members_can_do(
    chosen: str, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        trainer, old, new = await cluster.trainer(), await cluster.replica(), await cluster.replica()
        old.describes = chosen == "gather_broadcast"
        spec["publication"] = {"path": chosen}
        job_id = await cluster.submit(spec)
        job = await cluster.ended(job_id)
        assert job.state is JobState.SUCCEEDED and len(new.publications) == 7
        sharded = {weights_pb2.PATH_SHARDED}
        assert set(trainer.paths) == (sharded if chosen == "sharded" else {weights_pb2.PATH_GATHER_BROADCAST})
        if chosen == "sharded":
            failures = await cluster.events(job_id, "publication.failed")
            assert old.publications == [] and failures[0].data.culprits == [old.id]
            assert "cannot take part" in failures[0].message

    played(shared, spec)


@scenario
async def test_changes_are_sent_to_replicas_that_hold_the_base(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _, other = await cluster.trainer(), await cluster.replica(), await cluster.replica()

    async def lose(request: Any) -> None:
        other.loses_base = request.publication.version == 3

    other.faults["PreparePublication"] = lose
    spec["publication"] = {"path": "delta"}
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and other.publications == list(range(7))
    assert set(trainer.paths) == {weights_pb2.PATH_DELTA}
    assert trainer.sent_whole[-6:] == [False, False, True, False, False, False], "all get everything where one lacks it"
    assert trainer.sent_whole[0] and not await cluster.events(job_id, "publication.failed")


@scenario
async def test_a_replica_that_takes_no_deltas_makes_them_whole(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, old = await cluster.trainer(), await cluster.replica()
    old.takes_deltas = False
    spec["publication"] = {"path": "delta"}
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and set(trainer.paths) == {weights_pb2.PATH_SHARDED}


@scenario
async def test_layouts_are_asked_for_once(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(), await cluster.replica()
    asked = []

    async def count(request: Any) -> None:
        asked.append(type(request).__name__)

    trainer.faults["DescribeWeights"] = replica.faults["DescribeWeights"] = count
    assert (await cluster.ended(await cluster.submit(spec))).state is JobState.SUCCEEDED
    assert sorted(asked) == ["DescribeReceiveRequest", "DescribeSendRequest"]
    assert trainer.paths == [weights_pb2.PATH_SHARDED] * 7
    assert replica.told_whole == [True] + [False] * 6, "after the first time the plan's hash is enough"


@scenario
async def test_a_publication_that_is_agreed_on_takes_two_calls_to_each_receiver(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer()
    new, earlier = await cluster.replica(), await cluster.replica()
    earlier.joins_phases = False
    assert (await cluster.ended(await cluster.submit(spec))).state is JobState.SUCCEEDED
    assert new.publications == earlier.publications == list(range(7))
    assert new.asked[-6:] == ["PreparePublication", "VerifyPublication"] * 3
    assert earlier.asked[-8:] == [*PHASES] * 2


@scenario
async def test_a_receiver_that_forgot_the_plan_is_told_it_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer()
    replica = await cluster.replica()

    async def forget(_: Any) -> None:
        if len(replica.told_whole) == 2:
            replica.agreed = b""

    replica.faults["PreparePublication"] = forget
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and await cluster.events(job.id, "publication.failed") == []
    assert replica.told_whole == [True, False, False, True, False, False, False, False]
