"""Replicas that join in the middle of a job: from a sibling, or from the trainer where no sibling can."""

import asyncio
from typing import Any

import pytest

from millrace import events
from millrace.errors import InvalidState, PublicationFailed
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.services.coordinator.peers import SimulatedReplica, SimulatedTrainer


class Joined:
    """A job with a trainer whose steps last until `step`, a replica that serves version 1, and one more that joins in
    the middle of step 2."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.step = asyncio.Event()
        self.stepping = asyncio.Event()

    async def begin(self, spec: dict[str, Any], publication_s: float = 20.0, steps: int = 4) -> None:
        spec["schedule"] |= {"steps": steps}
        spec["deadlines"] = {"publication_s": publication_s}
        spec.pop("evaluation")
        self.trainer: SimulatedTrainer = await self.cluster.trainer()
        self.sibling: SimulatedReplica = await self.cluster.replica(capacity=2, seconds=0.2)
        self.trainer.faults["Step"] = self._hold
        self.job_id = await self.cluster.submit(spec)
        await asyncio.wait_for(self.stepping.wait(), 60)

    async def _hold(self, request: Any) -> None:
        if request.step == 2:
            self.stepping.set()
            await self.step.wait()

    async def join(self) -> SimulatedReplica:
        self.late: SimulatedReplica = await self.cluster.replica()
        self.held_at_first: list[int] = []

        async def first(lease: Any) -> None:
            self.held_at_first.append(self.late.version)

        self.late.faults["Generate"] = first
        return self.late

    async def end(self) -> None:
        self.step.set()
        job = await self.cluster.ended(self.job_id)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        assert set(self.trainer.every.values()) == {1} and self.trainer.stalest <= 1
        assert -1 not in self.held_at_first

    async def reports(self) -> list[events.PublicationDone]:
        """Of the publications and copies that the late one got."""
        done = await self.cluster.events(self.job_id, "publication.done")
        return [e.data for e in done if any(m.member == self.late.id for m in e.data.members[1:])]

    async def failures(self) -> list[events.PublicationFailed]:
        return [e.data for e in await self.cluster.events(self.job_id, "publication.failed")]


@scenario
async def test_a_replica_joins_from_a_sibling_while_the_trainer_steps(cluster: Cluster, spec: dict[str, Any]) -> None:
    play = Joined(cluster)
    await play.begin(spec)
    published = len(play.trainer.paths)
    late = await play.join()
    await until(lambda: asyncio.sleep(0, late.publications == [1]))
    assert play.sibling.copied == [1] and len(play.trainer.paths) == published, "the trainer had no part in it"
    await until(lambda: asyncio.sleep(0, bool(play.sibling.finished)))
    assert [failure for _, failure in play.sibling.finished] == [""]
    await play.end()
    assert late.leased and play.held_at_first[0] >= 1, "it worked, not before it had a version"
    first, *later = await play.reports()
    assert (first.source, first.version) == ("sibling", 1)
    assert [m.member for m in first.members] == [play.sibling.id, late.id]
    assert [m.loader_names for m in first.members] == [[], ["model.norm.weight"]]
    assert first.members[0].bytes == 32 and first.seconds > 0
    assert [report.source for report in later] == ["trainer"] * 3
    assert await play.failures() == []
    joining = [e for e in await cluster.events(play.job_id, "member.joining") if late.id in e.data.members]
    assert [e.data.sender for e in joining] == [play.sibling.id]
    page = await asyncio.to_thread(metrics, cluster)
    label = f'job_id="{play.job_id}",outcome="done",source="sibling"'
    assert f"millrace_publications_total{{{label}}} 1.0" in page


def metrics(cluster: Cluster) -> str:
    import httpx

    return httpx.get(f"http://127.0.0.1:{cluster.coordinator.http_port}/metrics", trust_env=False).text


FAULTY = ("refuses", "dies", "hangs")


async def busy(request: Any) -> None:
    """So that it would look as if it was to blame, if it was asked."""
    await asyncio.sleep(60.0)


# `make test` has each call and each fault once
@pytest.mark.parametrize(
    ("method", "how"),
    [
        pytest.param(method, how, marks=[pytest.mark.matrix] * (number != FAULTY.index(how)))
        for number, method in enumerate(("DescribeCopy", "PrepareCopy", "TransferCopy"))
        for how in FAULTY
    ],
)
def test_the_trainer_stands_in_for_a_sibling_that_fails(
    method: str, how: str, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        play = Joined(cluster)
        await play.begin(spec, publication_s=2.0 if how == "hangs" else 20.0)

        async def fault(request: Any) -> None:
            del play.sibling.faults[method]
            if how == "refuses":
                raise InvalidState(f"{method} went wrong.")
            if how == "dies":
                play.sibling.dying = asyncio.create_task(play.sibling.die())
            await asyncio.sleep(60.0)

        play.sibling.faults[method] = fault
        late = await play.join()
        if method != "TransferCopy":
            late.faults["GetStatus"] = busy
        failed = await until(play.failures)
        assert [f.source for f in failed] == ["sibling"]
        assert failed[0].culprits == ([play.sibling.id] if how == "hangs" else [])
        play.step.set()
        await until(lambda: asyncio.sleep(0, late.publications[:1]))
        await play.end()
        reports = await play.reports()
        assert {report.source for report in reports} == {"trainer"}
        assert (play.sibling.publications[-1] == 4) == (how != "dies"), "one that lives goes on being served"

    played(shared, spec)


@scenario
async def test_a_joiner_that_fails_is_cut_out_and_the_sibling_serves_on(cluster: Cluster, spec: dict[str, Any]) -> None:
    play = Joined(cluster)
    await play.begin(spec)
    late = SimulatedReplica(cluster.coordinator.address)
    late.faults.once("VerifyPublication", PublicationFailed("1 messages arrived changed.", culprits=(late.id,)))
    await late.start()
    cluster.members.append(late)
    play.late, play.held_at_first = late, []
    (failed,) = await until(play.failures)
    assert (failed.culprits, failed.phase, failed.source) == ([late.id], "verify", "sibling")
    await until(lambda: asyncio.sleep(0, late.publications == [1]))
    assert play.sibling.copied == [1, 1], "it joined again, from the same sibling"
    await play.end()
    assert play.sibling.publications == [0, 1, 2, 3, 4]


@scenario
async def test_a_publication_ends_a_copy_and_serves_who_was_joining(cluster: Cluster, spec: dict[str, Any]) -> None:
    play = Joined(cluster)
    await play.begin(spec)
    copying = asyncio.Event()

    async def hang(request: Any) -> None:
        copying.set()
        await asyncio.sleep(60.0)

    play.sibling.faults["TransferCopy"] = hang
    late = await play.join()
    await asyncio.wait_for(copying.wait(), 60)
    play.step.set()
    await until(lambda: asyncio.sleep(0, late.publications[:1] == [2]))
    await until(lambda: asyncio.sleep(0, bool(play.sibling.finished)))
    assert play.sibling.finished[0][1] == "a publication came first"
    await play.end()
    assert await play.failures() == [] and late.publications == [2, 3, 4]
    assert {report.source for report in await play.reports()} == {"trainer"}


@scenario
async def test_who_joins_during_a_publication_is_looked_after_once_it_is_over(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    play = Joined(cluster)
    await play.begin(spec)
    slow = await cluster.replica()
    await until(lambda: asyncio.sleep(0, slow.publications == [1]))
    committing, joined, served = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def linger(request: Any) -> None:
        if request.publication.version == 2:
            committing.set()
            await joined.wait()

    async def hold(request: Any) -> None:
        await (served if request.step > 2 else play.step).wait()

    slow.faults["CommitPublication"], play.trainer.faults["Step"] = linger, hold
    play.step.set()
    await asyncio.wait_for(committing.wait(), 60)
    late = await play.join()
    joined.set()
    await until(lambda: asyncio.sleep(0, bool(late.publications)))
    served.set()
    await play.end()
    joining = [e for e in await cluster.events(play.job_id, "member.joining") if late.id in e.data.members]
    assert len(joining) <= 1 and await play.failures() == []


@pytest.mark.parametrize("why", ["gather_broadcast", "cannot tell its layout", "another dtype"])
def test_the_trainer_serves_where_no_sibling_can(why: str, shared: CoordinatorProcess, spec: dict[str, Any]) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        play = Joined(cluster)
        if why == "gather_broadcast":
            spec["publication"] = {"path": why}
        # Engines of two dtypes have no publication in common: that job goes on until it is cancelled.
        await play.begin(spec, steps=10_000 if why == "another dtype" else 4)
        play.sibling.describes = why != "cannot tell its layout"
        late = SimulatedReplica(cluster.coordinator.address)
        late.dtype = "bfloat16" if why == "another dtype" else "float32"
        await late.start()
        cluster.members.append(late)
        play.late, play.held_at_first = late, []
        await until(lambda: asyncio.sleep(0, bool(late.configured)))
        await asyncio.sleep(0.5)
        assert late.publications == [] and play.sibling.copied == []
        play.step.set()
        if why == "another dtype":
            await until(play.failures)
            await asyncio.to_thread(cluster.coordinator.client.cancel, play.job_id)
            await cluster.ended(play.job_id)
            return
        await until(lambda: asyncio.sleep(0, late.publications[:1]))
        await play.end()
        assert await play.failures() == [] and play.sibling.copied == []

    played(shared, spec)
