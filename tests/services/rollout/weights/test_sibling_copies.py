"""A replica's version copied to a sibling over gRPC: both real, while the one that sends generates."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, trainer_pb2, weights_pb2
from millrace.errors import Fenced, InvalidState, PublicationFailed
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Content
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage, PendingExchange
from millrace.weights.transfer.pipeline import SendPipeline
from services.rollout.weights.in_worker import receiver as receiver_in_worker
from tests.services.rollout.coordinator import JOB, configure, status, until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.parameters import engine_parameters
from tests.services.rollout.stack import Stack, replica_stack
from tests.services.rollout.weights.test_receive_shards import coming

Scenario = Callable[[Stack, Stack], Awaitable[None]]


class Gate:
    """Holds whoever sends before its third round, until it is opened or the channel fails."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    async def held(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 20.0)


class HeldChannel:
    def __init__(self, channel: Channel, gate: Gate) -> None:
        self.key, self.rank, self.deadline = channel.key, channel.rank, channel.deadline
        self.check, self.abort, self.close = channel.check, channel.abort, channel.close
        self._channel, self._gate, self._rounds = channel, gate, 0

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> PendingExchange:
        self._rounds += 1
        if self._rounds == 3:
            self._gate.reached.set()
            while not self._gate.open.wait(0.01):
                self._channel.check()
        return self._channel.exchange(sends, receives, stream)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()

    class Held(SendPipeline):
        def run(self, channel: Channel) -> Any:
            return super().run(HeldChannel(channel, gate))

    monkeypatch.setattr(receiver_in_worker, "SendPipeline", Held)
    return gate


def play(model: Path, scenario: Scenario) -> None:
    """Runs `scenario` on a replica that serves version 1, and one that is configured and has no weights."""

    async def whole() -> None:
        async with replica_stack() as sibling, replica_stack() as late:
            await sibling.serve(job_spec(model), version=1)
            await configure(late.peer, job_spec(model))
            await scenario(sibling, late)

    asyncio.run(whole())


class Copy:
    """A copy, phase by phase, as the coordinator has it made."""

    def __init__(
        self,
        sibling: Stack,
        late: Stack,
        *,
        version: int = 1,
        attempt: int = 5,
        deadline_s: float = 120.0,
        content: Content = Content.MODEL,
    ):
        self.sibling, self.late, self.deadline_s, self.content = sibling, late, deadline_s, content.value
        self.ref = weights_pb2.PublicationRef(job_id=JOB, version=version, epoch=1, attempt=attempt)

    async def prepare(self) -> None:
        describe = trainer_pb2.DescribeSendRequest(job_id=JOB, content=self.content)
        told = await self.sibling.peer.call(RolloutRpc.DescribeCopy, describe)
        request = rollout_pb2.DescribeReceiveRequest(job_id=JOB, manifest=told.manifest)
        wanted = await self.late.peer.call(RolloutRpc.DescribeWeights, request)
        both = weights_pb2.Sides(senders=told.layouts, receivers=wanted.layouts, message_bytes=16384)
        assert len(wire_layouts.decode(told.layouts)) == 1 and not told.gpu
        assert wire_layouts.hosts_of(told.layouts) == wire_layouts.hosts_of(wanted.layouts) != [""]
        receiver = weights_pb2.Receiver(member_id=self.late.replica.member_id, first_rank=1, world_size=1)
        send = trainer_pb2.PrepareSendRequest(
            publication=self.ref,
            path=weights_pb2.PATH_SHARDED,
            receivers=[receiver],
            dtype="float32",
            deadline_s=self.deadline_s,
            sides=both,
            content=self.content,
        )
        prepared = await self.sibling.peer.call(RolloutRpc.PrepareCopy, send)
        assert prepared.rendezvous.passing
        receive = rollout_pb2.PrepareReceiveRequest(
            publication=self.ref,
            path=weights_pb2.PATH_SHARDED,
            manifest=told.manifest,
            rendezvous=prepared.rendezvous,
            receiver=receiver,
            plan_hash=prepared.plan_hash,
            deadline_s=self.deadline_s,
            sides=both,
        )
        await self.late.peer.call(RolloutRpc.PreparePublication, receive)

    async def begin(self) -> "asyncio.Task[Any]":
        await self.prepare()
        await self.late.peer.call(
            RolloutRpc.TransferPublication, rollout_pb2.TransferReceiveRequest(publication=self.ref)
        )
        return asyncio.create_task(self.send())

    async def send(self) -> trainer_pb2.TransferSendResponse:
        request = trainer_pb2.TransferSendRequest(publication=self.ref)
        return await self.sibling.peer.call(RolloutRpc.TransferCopy, request)

    async def verify(self, sent: trainer_pb2.TransferSendResponse) -> None:
        request = rollout_pb2.VerifyReceiveRequest(publication=self.ref, checksums=sent.checksums)
        await self.late.peer.call(RolloutRpc.VerifyPublication, request)

    async def commit(self) -> weights_pb2.MemberReport:
        request = rollout_pb2.CommitReceiveRequest(publication=self.ref)
        return (await self.late.peer.call(RolloutRpc.CommitPublication, request)).report

    async def finish(self, failure: str = "") -> None:
        request = trainer_pb2.FinishSendRequest(publication=self.ref, failure=failure)
        await self.sibling.peer.call(RolloutRpc.FinishCopy, request)

    async def whole(self) -> tuple[weights_pb2.MemberReport, weights_pb2.MemberReport]:
        sent = await (await self.begin())
        await self.verify(sent)
        report = await self.commit()
        await self.finish()
        return sent.report, report


async def same_weights(one: Stack, other: Stack) -> bool:
    assert one.replica.engine is not None and other.replica.engine is not None
    held, expected = await engine_parameters(one.replica.engine), await engine_parameters(other.replica.engine)
    return held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in held)


def test_a_sibling_generates_while_it_sends(tied_model: Path, gate: Gate) -> None:
    async def scenario(sibling: Stack, late: Stack) -> None:
        prompt = sibling.coordinator.issue(1, max_response_tokens=100)
        await until(lambda: sibling.replica.load().running > 0)
        copy = Copy(sibling, late)
        sending = await copy.begin()
        await gate.held()
        await until(lambda: prompt in sibling.coordinator.groups)
        assert not sending.done() and (await status(late.peer)).version == -1
        spans = [span for t in sibling.coordinator.groups[prompt].trajectories for span in t.versions]
        assert {span.version for span in spans} == {1}
        idle = late.coordinator.issue(2)
        gate.open.set()
        sent = await sending
        await copy.verify(sent)
        assert idle not in late.coordinator.groups, "no lease before it serves a verified version"
        report = await copy.commit()
        await copy.finish()
        await until(lambda: idle in late.coordinator.groups)
        assert {s.version for t in late.coordinator.groups[idle].trajectories for s in t.versions} == {1}
        assert await same_weights(late, sibling)
        assert (report.bytes, report.loader_tensors, report.member_id) == (sent.report.bytes, 0, late.replica.member_id)
        assert sent.report.member_id == sibling.replica.member_id and sent.report.staging_bytes > 0
        assert (await status(sibling.peer)).version == 1

    play(tied_model, scenario)


def test_a_publication_that_is_prepared_ends_a_copy(tied_model: Path, gate: Gate) -> None:
    async def scenario(sibling: Stack, late: Stack) -> None:
        copy = Copy(sibling, late)
        sending = await copy.begin()
        await gate.held()
        new = await coming(sibling, 2, attempt=6)
        began = time.monotonic()
        await new.prepare()
        with pytest.raises(PublicationFailed, match=r"aborted|ended"):
            await sending
        with pytest.raises(PublicationFailed):
            await copy.verify(trainer_pb2.TransferSendResponse())
        assert time.monotonic() - began < 60.0
        with pytest.raises(InvalidState, match="serves no version that can be copied"):
            await Copy(sibling, late, attempt=7).prepare()
        gate.open.set()
        new.sender.start()
        await new.transfer()
        await new.verify()
        await new.commit()
        await asyncio.to_thread(new.sender.join)
        with pytest.raises(Fenced, match="older than"):
            await Copy(sibling, late, version=2, attempt=4).prepare()
        await Copy(sibling, late, version=2, attempt=8).whole()
        assert (await status(late.peer)).version == 2 and await same_weights(late, sibling)

    play(tied_model, scenario)


def test_only_what_is_served_is_copied(tied_model: Path) -> None:
    async def scenario(sibling: Stack, late: Stack) -> None:
        with pytest.raises(Fenced, match="of another version than"):
            await Copy(sibling, late, version=2).prepare()
        with pytest.raises(InvalidState, match="serves no version that can be copied"):
            await Copy(late, sibling).prepare()
        copy = Copy(sibling, late)
        with pytest.raises(InvalidState, match="never prepared"):
            await copy.send()
        sent = await (await copy.begin())
        assert (await copy.send()).checksums == sent.checksums, "asked again it answers the same"
        await copy.verify(sent)
        await copy.commit()
        await copy.finish()
        await copy.finish()
        with pytest.raises(InvalidState):
            await copy.send()

    play(tied_model, scenario)


@pytest.mark.parametrize("how", ["told", "deadline"])
def test_a_copy_that_is_called_off_or_late_frees_both(tied_model: Path, gate: Gate, how: str) -> None:
    async def scenario(sibling: Stack, late: Stack) -> None:
        deadline_s = 120.0 if how == "told" else 5.0  # the copy begins within it however busy the machine
        copy = Copy(sibling, late, deadline_s=deadline_s)
        sending = await copy.begin()
        await gate.held()
        began = time.monotonic()
        if how == "told":
            await copy.finish("a publication came first")
        with pytest.raises(PublicationFailed):
            await sending
        with pytest.raises((PublicationFailed, InvalidState)):
            await copy.verify(trainer_pb2.TransferSendResponse())
        assert time.monotonic() - began < 60.0
        assert (await status(sibling.peer)).version == 1 and (await status(late.peer)).version == -1
        gate.open.set()
        await Copy(sibling, late, attempt=6).whole()
        assert await same_weights(late, sibling)

    play(tied_model, scenario)
