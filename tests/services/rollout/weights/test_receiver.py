"""The receiver's side of a publication over gRPC: phases repeated, late, aborted, corrupted, given up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.errors import Fenced, InvalidState, PublicationFailed
from services.rollout.weights.engine_weights import CommitReport
from tests.models import random_model
from tests.sender import Sender, export
from tests.services.rollout.coordinator import JOB, Publication, status, until
from tests.services.rollout.stack import Stack, play


def publication(stack: Stack, version: int, **options: Any) -> Publication:
    tensors = export(random_model(tied=True, seed=version))
    return Publication(stack.peer, stack.replica.member_id, Sender(tensors, version=version, job=JOB, **options))


async def still_serves(stack: Stack, version: int) -> None:
    now = await status(stack.peer)
    assert (now.state, now.version) == (rollout_pb2.ENGINE_STATE_SERVING, version)
    answered = stack.coordinator.answered
    prompt_id = stack.coordinator.issue(100 + answered)
    await until(lambda: stack.coordinator.answered == answered + 1)
    spans = [v for t in stack.coordinator.groups[prompt_id].trajectories for v in t.versions]
    assert {v.version for v in spans} == {version}


def test_report_tells_what_was_done(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        report = await new.whole()
        assert report.member_id == stack.replica.member_id
        assert report.bytes == new.sender.manifest.bytes
        assert report.loader_tensors == len(new.sender.tensors)
        assert report.pause_s > report.apply_s > 0
        assert report.prepare_s > 0 and report.wire_s > 0 and report.verify_s > 0
        await still_serves(stack, 2)

    play(tied_model, scenario)


def test_every_phase_may_be_repeated(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        assert await new.prepare() == await new.prepare()
        new.sender.start()
        await new.transfer()
        await new.transfer()
        await asyncio.gather(new.verify(), new.verify())
        first, second = await asyncio.gather(new.commit(), new.commit())
        assert first == second == await new.commit()
        await new.abort()
        await still_serves(stack, 2)

    play(tied_model, scenario)


def test_two_calls_are_enough_and_may_be_repeated(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        new.sender.start()
        first, second = await asyncio.gather(new.prepared(begin=True), new.prepared(begin=True))
        assert first == second == await new.prepared(begin=True) and first.begun
        await new.transfer()
        first, second = await asyncio.gather(new.verify(commit=True), new.verify(commit=True))
        assert first == second == await new.verify(commit=True)
        assert first.report == await new.commit() and first.report.pause_s > 0 and not first.commit_failure
        await still_serves(stack, 2)

    play(tied_model, scenario)


def test_corrupted_bytes_are_not_committed_by_the_call_that_verifies(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        new.sender.start()
        await new.prepared(begin=True)
        sent = list(new.sender.checksums)
        sent[3] ^= 1
        with pytest.raises(PublicationFailed, match=r"1 messages arrived .* changed"):
            await new.verify(tuple(sent), commit=True)
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_a_commit_that_fails_is_told_apart_from_its_verification(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        new.sender.start()
        await new.prepared(begin=True)
        engine: Any = stack.replica.engine

        async def fails(*arguments: Any) -> CommitReport:
            raise PublicationFailed("the parameters differ.")

        engine.commit = fails
        answer = await new.verify(commit=True)
        assert "the parameters differ" in answer.commit_failure and not answer.HasField("report")
        now = await status(stack.peer)
        assert (now.state, now.version) == (rollout_pb2.ENGINE_STATE_WITHOUT_WEIGHTS, -1)

    play(tied_model, scenario)


def test_an_abort_ends_a_publication_that_began_with_its_preparation(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2, hold_after=4)
        new.sender.start()
        assert (await new.prepared(begin=True)).begun
        await new.abort()
        with pytest.raises(InvalidState, match="is in phase none"):
            await new.verify(commit=True)
        new.sender.release()
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_phases_come_in_order(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        with pytest.raises(InvalidState, match="was never prepared"):
            await new.transfer()
        await new.prepare()
        with pytest.raises(InvalidState, match="is in phase prepare"):
            await new.commit()
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_an_older_epoch_is_refused_in_every_phase(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        await publication(stack, 2, epoch=5).whole()
        late = publication(stack, 3, epoch=4)
        for phase in (late.prepare, late.transfer, late.verify, late.commit):
            with pytest.raises(Fenced, match="is older than"):
                await phase()
        await late.abort()
        await still_serves(stack, 2)

    play(tied_model, scenario)


def test_corrupted_bytes_are_never_served(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        await new.prepare()
        new.sender.start()
        await new.transfer()
        sent = list(new.sender.checksums)
        sent[3] ^= 1
        with pytest.raises(PublicationFailed, match=r"1 messages arrived .* changed, with parts of model") as failed:
            await new.verify(tuple(sent))
        assert failed.value.culprits == (stack.replica.member_id,)
        with pytest.raises(InvalidState, match="commit does not follow"):
            await new.commit()
        await still_serves(stack, 1)
        await publication(stack, 2, attempt=1).whole()
        await still_serves(stack, 2)

    play(tied_model, scenario)


def test_another_plan_path_or_size_is_refused_in_prepare(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        with pytest.raises(PublicationFailed, match="plans") as failed:
            await publication(stack, 2).prepare(plan_hash=b"x" * 32)
        assert failed.value.culprits == (stack.replica.member_id,)
        with pytest.raises(InvalidState, match="no path"):
            await publication(stack, 3).prepare(path=7)
        with pytest.raises(PublicationFailed, match="has 1 workers, not 2"):
            receiver = weights_pb2.Receiver(member_id=stack.replica.member_id, first_rank=1, world_size=2)
            await publication(stack, 4).prepare(receiver=receiver)
        with pytest.raises(PublicationFailed, match="manifest's hash"):
            new = publication(stack, 5)
            manifest = new.sender.manifest.to_proto()
            manifest.tensors[0].shape[0] += 1
            await new.prepare(manifest=manifest)
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_another_job_is_refused(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        with pytest.raises(InvalidState, match="configured for job-test, not for job-other"):
            tensors = export(random_model(tied=True, seed=2))
            sender = Sender(tensors, version=2, job="job-other")
            await Publication(stack.peer, stack.replica.member_id, sender).prepare()

    play(tied_model, scenario)


def test_abort_ends_a_verify_that_waits_for_bytes(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2, hold_after=4)
        await new.prepare()
        new.sender.start()
        await new.transfer()
        waiting = asyncio.create_task(new.verify())
        await asyncio.sleep(0.2)
        async with asyncio.timeout(25):
            await new.abort()
            with pytest.raises(PublicationFailed, match="aborted"):
                await waiting
        new.sender.release()
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_a_newer_publication_ends_an_older_one(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        old = publication(stack, 2, hold_after=4)
        await old.prepare()
        old.sender.start()
        await old.transfer()
        waiting = asyncio.create_task(old.verify())
        await asyncio.sleep(0.2)
        new = publication(stack, 2, epoch=2)
        await new.whole()
        with pytest.raises(PublicationFailed):
            await waiting
        with pytest.raises(Fenced):
            await old.commit()
        old.sender.release()
        await still_serves(stack, 2)

    play(tied_model, scenario)


def test_a_publication_past_its_deadline_is_given_up_though_nobody_asks(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2, hold_after=4)
        await new.prepare(deadline_s=0.5)
        new.sender.start()
        await new.transfer()
        await asyncio.sleep(1.0)
        with pytest.raises(InvalidState, match="is in phase none"):
            await new.verify()
        new.sender.release()
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_a_sender_that_never_comes_fails_verify_within_the_deadline(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        await new.prepare(deadline_s=1.0)
        await new.transfer()
        async with asyncio.timeout(25):
            with pytest.raises(PublicationFailed):
                await new.verify()
        await still_serves(stack, 1)

    play(tied_model, scenario)


def test_a_caller_that_goes_away_in_commit_leaves_a_whole_version(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = publication(stack, 2)
        await new.prepare()
        new.sender.start()
        await new.transfer()
        await new.verify()
        engine, begun = stack.replica.engine, asyncio.Event()
        assert engine is not None
        commit = engine.commit

        async def commit_begun(*arguments: Any) -> CommitReport:
            begun.set()
            return await commit(*arguments)

        engine.commit = commit_begun  # type: ignore[method-assign]
        leaving = asyncio.create_task(new.commit())
        await begun.wait()
        leaving.cancel()
        await until(lambda: stack.replica.version == 2)
        report = await new.commit()
        assert report.pause_s > 0
        await still_serves(stack, 2)

    play(tied_model, scenario)
