"""The receiver's side of a sharded publication over gRPC: reported, corrupted, planned otherwise, aborted, given up."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.memory import Memory
from millrace.wire.address import host_name
from services.trainer.backends import build
from tests.models import random_model
from tests.sender import export
from tests.services.rollout.coordinator import JOB, status
from tests.services.rollout.stack import Stack, play
from tests.services.trainer.groups import job_spec
from tests.shard_sender import Shards, ShardSender

SHADOW, INPLACE = weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE


class Coming:
    """A sharded publication to the stack's replica, phase by phase."""

    def __init__(self, stack: Stack, sender: ShardSender) -> None:
        self.stack, self.sender = stack, sender
        job, version, epoch, attempt = sender.request.key.rsplit("/", 3)
        self.ref = weights_pb2.PublicationRef(job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt))

    async def prepare(self, **changes: Any) -> bytes:
        request = rollout_pb2.PrepareReceiveRequest.FromString(self.sender.request.encode())
        request.receiver.world_size = 1
        request.plan_hash = self.sender.plan.hash
        for name, value in changes.items():
            setattr(request, name, value)
        return bytes((await self.call(RolloutRpc.PreparePublication, request)).plan_hash)

    async def transfer(self) -> None:
        await self.call(RolloutRpc.TransferPublication, rollout_pb2.TransferReceiveRequest(publication=self.ref))

    async def verify(self) -> None:
        """Once the sender knows what it sent."""
        for _ in range(6000):
            if len(self.sender.sums) == len(self.sender.plan.sizes):
                break
            await asyncio.sleep(0.01)
        sums = weights_pb2.Checksums(values=[self.sender.sums.get(c, 0) for c in range(len(self.sender.plan.sizes))])
        await self.call(
            RolloutRpc.VerifyPublication, rollout_pb2.VerifyReceiveRequest(publication=self.ref, checksums=sums)
        )

    async def commit(self) -> weights_pb2.MemberReport:
        reply = await self.call(RolloutRpc.CommitPublication, rollout_pb2.CommitReceiveRequest(publication=self.ref))
        return reply.report

    async def abort(self) -> None:
        await self.call(
            RolloutRpc.AbortPublication, rollout_pb2.AbortReceiveRequest(publication=self.ref, reason="told so")
        )

    async def begin(self) -> None:
        await self.prepare()
        self.sender.start()
        await self.transfer()

    async def whole(self) -> weights_pb2.MemberReport:
        await self.begin()
        await self.verify()
        report = await self.commit()
        await asyncio.to_thread(self.sender.join)
        return report

    async def call(self, method: Unary[Request, Response], request: Request) -> Response:
        return await self.stack.peer.call(method, request)


async def coming(
    stack: Stack, version: int, mode: int = SHADOW, memory: Memory | None = None, **options: Any
) -> Coming:
    """What the one rank of a trainer holds in `memory`, or a model with other weights for each version."""
    shards = Shards(export(random_model(tied=True, seed=version)))
    if memory is not None:
        shards.manifest, shards.ranks = memory.manifest, [memory]
    request = rollout_pb2.DescribeReceiveRequest(job_id=JOB, manifest=shards.manifest.to_proto())
    told = await stack.peer.call(RolloutRpc.DescribeWeights, request)
    wanted = wire_layouts.decode(told.layouts)
    assert wire_layouts.hosts_of(told.layouts) == [host_name()] * len(wanted)
    return Coming(stack, ShardSender(shards, wanted, version=version, job=JOB, mode=mode, **options))  # type: ignore[arg-type]


async def serves(stack: Stack, version: int | None) -> None:
    now = await status(stack.peer)
    expected = rollout_pb2.ENGINE_STATE_WITHOUT_WEIGHTS if version is None else rollout_pb2.ENGINE_STATE_SERVING
    assert (now.state, now.version) == (expected, -1 if version is None else version)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_report_tells_what_was_done(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        new = await coming(stack, 2, mode)
        report = await new.whole()
        assert report.mode == mode and report.loader_tensors == 0
        assert report.bytes == new.sender.plan.sizes.sum()
        assert (report.staging_bytes >= report.bytes) == (mode == SHADOW)
        assert report.prepare_s > 0 and report.wire_s > 0 and report.verify_s > 0 and report.pause_s > 0
        await serves(stack, 2)
        engine: Any = stack.replica.engine
        expected = export(random_model(tied=True, seed=2))
        assert all(torch.equal(dict(engine._model.named_parameters())[name], t) for name, t in expected.items())

    play(tied_model, scenario)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_weights_that_the_trainer_merges_with_an_adapter_as_it_sends_them(tied_model: Path, mode: int) -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    lora = {"rank": 3, "merge": True}
    trainer: Any = build(job_spec(tied_model, model={"lora": lora}), torch.device("cpu"))
    with torch.no_grad():
        for tensor in trainer.state().values():
            tensor.add_(0.1)
    memory = trainer.shards("float32")
    expected = {info.name: tensor for info, tensor in trainer.export("float32")}
    dist.destroy_process_group()
    assert len(memory.computed) == 14

    async def scenario(stack: Stack) -> None:
        new = await coming(stack, 2, mode, memory=memory)
        await new.whole()
        await serves(stack, 2)
        engine: Any = stack.replica.engine
        held = dict(engine._model.named_parameters())
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())

    play(tied_model, scenario)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_one_that_would_pause_generation_waits_for_a_call_of_its_own(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        new = await coming(stack, 2, mode)
        request = rollout_pb2.PrepareReceiveRequest.FromString(new.sender.request.encode())
        request.receiver.world_size, request.begin = 1, True
        answer = await new.call(RolloutRpc.PreparePublication, request)
        assert answer.plan_hash == new.sender.plan.hash and answer.begun == (mode == SHADOW)
        new.sender.start()
        await new.transfer()
        await new.verify()
        await new.commit()
        await asyncio.to_thread(new.sender.join)
        await serves(stack, 2)

    play(tied_model, scenario)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_a_byte_that_changed_on_the_wire_is_never_served(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        new = await coming(stack, 2, mode, corrupt=True)
        await new.begin()
        with pytest.raises(PublicationFailed, match=r"messages arrived .* changed, with parts of model\.") as failed:
            await new.verify()
        assert failed.value.culprits == (stack.replica.member_id,)
        with pytest.raises(InvalidState, match="commit does not follow"):
            await new.commit()
        await serves(stack, 1 if mode == SHADOW else None)
        await (await coming(stack, 2, mode, attempt=1)).whole()
        await serves(stack, 2)

    play(tied_model, scenario)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_an_abort_frees_sender_and_receiver_at_once(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        new = await coming(stack, 2, mode, hold_after=2)
        await new.begin()
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(
            new.call(RolloutRpc.VerifyPublication, rollout_pb2.VerifyReceiveRequest(publication=new.ref))
        )
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await new.abort()
        with pytest.raises(PublicationFailed, match="aborted"):
            await waiting
        new.sender.release()
        with pytest.raises(PublicationFailed, match=r"told to abort|failed"):
            await asyncio.to_thread(new.sender.join)
        assert time.monotonic() - began < 60.0
        await serves(stack, 1 if mode == SHADOW else None)
        await (await coming(stack, 2, mode, attempt=1)).whole()
        await serves(stack, 2)

    play(tied_model, scenario)


def test_a_sender_that_never_comes_fails_verify_within_the_deadline(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        new = await coming(stack, 2, timeout_s=1.0)
        await new.prepare(deadline_s=30.0)
        await new.abort()
        late = await coming(stack, 2, attempt=1, timeout_s=1.0)
        await late.prepare()
        await late.transfer()
        began = time.monotonic()
        with pytest.raises((PublicationFailed, InvalidState)):
            await late.call(RolloutRpc.VerifyPublication, rollout_pb2.VerifyReceiveRequest(publication=late.ref))
        assert time.monotonic() - began < 60.0
        await serves(stack, 1)

    play(tied_model, scenario)


def test_another_plan_layout_or_communicator_is_refused_in_prepare(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        with pytest.raises(PublicationFailed, match="plans") as failed:
            await (await coming(stack, 2)).prepare(plan_hash=b"x" * 32)
        assert failed.value.culprits == (stack.replica.member_id,)
        other = await coming(stack, 3)
        other.sender.request.layouts.receivers.CopyFrom(other.sender.request.layouts.senders)
        with pytest.raises(PublicationFailed):
            await other.prepare(plan_hash=b"")
        standing = await coming(stack, 4)
        request = rollout_pb2.PrepareReceiveRequest.FromString(standing.sender.request.encode())
        request.receiver.world_size, request.rendezvous.standing = 1, True
        with pytest.raises(PublicationFailed, match="not in communicator"):
            await standing.call(RolloutRpc.PreparePublication, request)
        await serves(stack, 1)

    play(tied_model, scenario)


@pytest.mark.parametrize("ends", ["abort", "close"])
def test_one_that_is_called_off_while_it_is_prepared_leaves_nothing_behind(
    tied_model: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stack: Stack) -> None:
        new, engine = await coming(stack, 2), stack.replica.engine
        assert engine is not None
        prepare, entered, gate = engine.prepare_receive, asyncio.Event(), asyncio.Event()

        async def slowly(request: Any) -> None:
            await prepare(request)
            entered.set()
            await gate.wait()

        with monkeypatch.context() as patch:
            patch.setattr(engine, "prepare_receive", slowly)
            preparing = asyncio.create_task(new.prepare())
            await entered.wait()
            receiver = stack.replica.receiver(JOB)
            if ends == "abort":
                await new.abort()
            else:
                closing = asyncio.create_task(receiver.close())
                await asyncio.sleep(0.1)
            gate.set()
            with pytest.raises(PublicationFailed, match="aborted while it was prepared"):
                await preparing
        assert receiver._deadline is None or receiver._deadline.cancelled()
        await serves(stack, 1)
        if ends == "abort":
            await (await coming(stack, 2, attempt=1)).whole()
            await serves(stack, 2)
        else:
            await closing
            with pytest.raises(InvalidState, match="has left this job"):
                await new.prepare()

    play(tied_model, scenario)


@pytest.mark.parametrize("first", ["commit", "abort"])
def test_an_abort_beside_a_commit_leaves_a_whole_version(
    tied_model: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first is done, though it takes a while to begin: as a commit does that waits for the pause."""

    async def scenario(stack: Stack) -> None:
        new, engine = await coming(stack, 2), stack.replica.engine
        assert engine is not None
        method = "commit" if first == "commit" else "abort_receive"
        real, entered, gate = getattr(engine, method), asyncio.Event(), asyncio.Event()

        async def slowly(*arguments: Any) -> Any:
            entered.set()
            await gate.wait()
            return await real(*arguments)

        await new.begin()
        await new.verify()
        monkeypatch.setattr(engine, method, slowly)
        calls = [new.commit, new.abort] if first == "commit" else [new.abort, new.commit]
        begun = asyncio.create_task(calls[0]())
        await entered.wait()
        other = asyncio.create_task(calls[1]())
        await asyncio.sleep(0.2)
        gate.set()
        results = await asyncio.gather(begun, other, return_exceptions=True)
        if first == "commit":
            assert not any(isinstance(result, BaseException) for result in results)
        else:
            assert isinstance(results[1], PublicationFailed | InvalidState)
        await serves(stack, 2 if first == "commit" else 1)
        await asyncio.to_thread(new.sender.join)
        monkeypatch.undo()
        await (await coming(stack, 3)).whole()
        await serves(stack, 3)

    play(tied_model, scenario)
