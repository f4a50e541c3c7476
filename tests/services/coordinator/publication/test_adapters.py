"""A job whose replicas get the base of an adapter once and the adapter alone with each version."""

import asyncio
from typing import Any

from millrace.errors import PublicationFailed
from millrace.rest import JobState
from millrace.weights.plans.manifest import Content
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.publication.test_joining import Joined

ADAPTER, BASE = Content.ADAPTER, Content.BASE


def with_adapter(spec: dict[str, Any]) -> dict[str, Any]:
    return spec | {"model": spec["model"] | {"lora": {"merge": False}}}


async def contents(cluster: Cluster, job_id: str) -> list[tuple[str, str, int]]:
    """Content, source and version of each publication."""
    done = await cluster.events(job_id, "publication.done")
    return [(e.data.content, e.data.source, e.data.version) for e in done]


@scenario
async def test_the_base_travels_once_and_then_the_adapter_alone(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec = with_adapter(spec)
    spec["schedule"] |= {"steps": 3}
    spec.pop("evaluation")
    trainer = await cluster.trainer()
    one, other = [await cluster.replica() for _ in range(2)]
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    for replica in (one, other):
        got = [content for content, members in trainer.sent if replica.id in members]
        assert got[0] is BASE and set(got[1:]) == {ADAPTER}
        assert replica.publications == [*range(replica.publications[0], 4)]
    assert {content for content, _, _ in await contents(cluster, job.id)} == {"base", "adapter"}


@scenario
async def test_a_replica_joins_with_base_and_adapter_from_a_sibling(cluster: Cluster, spec: dict[str, Any]) -> None:
    play = Joined(cluster)
    await play.begin(with_adapter(spec))
    published = len(play.trainer.paths)
    late = await play.join()
    await until(lambda: asyncio.sleep(0, late.publications == [1]))
    assert late.in_place == {BASE, ADAPTER}
    assert play.sibling.copied == [1, 1] and len(play.trainer.paths) == published, "the trainer had no part in it"
    await play.end()
    assert [each for each in await contents(cluster, play.job_id) if each[1] == "sibling"] == [
        ("base", "sibling", 1),
        ("adapter", "sibling", 1),
    ]
    assert all(content is ADAPTER for content, _ in play.trainer.sent[published:])
    assert await play.failures() == []


@scenario
async def test_a_copy_of_the_base_goes_on_during_publications(cluster: Cluster, spec: dict[str, Any]) -> None:
    """The trainer goes on while a base is copied, and never sends it."""
    play = Joined(cluster)
    await play.begin(with_adapter(spec), steps=5)
    published, copying, go_on = len(play.trainer.sent), asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        del play.sibling.faults["TransferCopy"]
        copying.set()
        await go_on.wait()

    play.sibling.faults["TransferCopy"] = hold
    late = await play.join()
    await asyncio.wait_for(copying.wait(), 60)

    async def last(request: Any) -> None:
        if request.step == 5:
            await again.wait()

    again = asyncio.Event()
    play.trainer.faults["Step"] = last
    play.step.set()
    await until(lambda: asyncio.sleep(0, play.sibling.publications[-1] == 4))
    assert late.in_place == set() and not late.publications
    go_on.set()
    await until(lambda: asyncio.sleep(0, late.publications == [4]))
    again.set()
    await play.end()
    assert all(content is ADAPTER for content, _ in play.trainer.sent[published:])
    assert await play.failures() == []


@scenario
async def test_a_replica_that_failed_keeps_its_base(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It is configured again, says that it has the base, and gets the adapter only."""
    play = Joined(cluster)
    await play.begin(with_adapter(spec), steps=4)
    late, again = await play.join(), asyncio.Event()
    await until(lambda: asyncio.sleep(0, late.publications == [1]))
    late.faults.once("VerifyPublication", PublicationFailed("a byte changed.", "", (late.id,)))
    before = len(play.trainer.sent)

    async def hold(request: Any) -> None:
        if request.step == 4:
            await again.wait()

    play.trainer.faults["Step"] = hold
    play.step.set()
    await until(lambda: asyncio.sleep(0, late.publications[-1] == 3))
    again.set()
    await play.end()
    first, second, *others = play.sibling.copied
    assert len(late.configured) == 2 and (first, second) == (1, 1)
    assert others in ([2], [3]), "the second time only the adapter, of whichever version is served then"
    assert all(content is ADAPTER for content, _ in play.trainer.sent[before:])
    (failure,) = await play.failures()
    assert (failure.version, failure.phase, failure.culprits) == (2, "verify", [late.id])
