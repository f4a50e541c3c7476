"""The receiver's side of changes alone over gRPC: exact, refused where they are damaged, whole without a base."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.plans import wire_layouts
from millrace.weights.transfer.delta.exchange import Snapshot
from tests.layouts import packed_by
from tests.models import random_model
from tests.sender import export
from tests.services.rollout.coordinator import JOB, publish
from tests.services.rollout.stack import Stack, play
from tests.services.rollout.weights.test_receive_shards import Coming, serves
from tests.shard_sender import Shards, ShardSender

SHADOW, INPLACE = weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE
MODES = pytest.mark.parametrize("mode", [SHADOW, INPLACE])


def stepped(version: int) -> Any:
    """A model whose weights changed a little with each version."""
    model, random = random_model(tied=True, seed=1), torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            flat[torch.rand(len(flat), generator=random) < 0.02] *= 1.01
    return model


class Deltas:
    """The sender's side of one job: shards, and the snapshots of what was sent last."""

    def __init__(self, stack: Stack, mode: int) -> None:
        self.stack, self.mode = stack, mode
        self.snapshots: list[Snapshot] = []
        self.base = ""

    async def coming(self, version: int, *, attempt: int = 0, **options: Any) -> Coming:
        shards = Shards(export(stepped(version)))
        request = rollout_pb2.DescribeReceiveRequest(job_id=JOB, manifest=shards.manifest.to_proto())
        told = await self.stack.peer.call(RolloutRpc.DescribeWeights, request)
        assert told.deltas
        wanted = wire_layouts.decode(told.layouts)
        options |= {"version": version, "job": JOB, "mode": self.mode, "attempt": attempt, "base": self.base}
        if not self.snapshots:
            plan, device = ShardSender(shards, wanted, **options).plan, torch.device("cpu")
            packed = [{c: int(plan.sizes[c]) for c in packed_by(plan, rank).tolist()} for rank in range(plan.senders)]
            self.snapshots = [Snapshot(plan.hash, sizes, device) for sizes in packed]
        return Coming(self.stack, ShardSender(shards, wanted, snapshots=self.snapshots, **options))

    async def publish(self, version: int, **options: Any) -> tuple[weights_pb2.MemberReport, float]:
        """The receiver's report, and the part of the weights that was sent."""
        new = await self.coming(version, **options)
        report = await new.whole()
        self.base = new.sender.request.key
        await serves(self.stack, version)
        engine: Any = self.stack.replica.engine
        held = dict(engine._model.named_parameters())
        for name, tensor in export(stepped(version)).items():
            assert torch.equal(held[name].view(torch.int32), tensor.view(torch.int32)), name
        return report, new.sender.sent_bytes / report.bytes

    async def lacks(self, new: Coming) -> bool:
        """Whether the replica answers PREPARE that it needs everything."""
        request = rollout_pb2.PrepareReceiveRequest.FromString(new.sender.request.encode())
        request.receiver.world_size, request.plan_hash = 1, new.sender.plan.hash
        return (await new.call(RolloutRpc.PreparePublication, request)).lacks_base


@MODES
def test_changes_alone_make_every_bit_of_the_version(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        deltas = Deltas(stack, mode)
        _, first = await deltas.publish(2)
        assert first >= 1.0
        for version in (3, 4, 5):
            report, sent = await deltas.publish(version)
            assert sent < 0.2 and report.mode == mode and report.code_s > 0
        assert not await deltas.lacks(await deltas.coming(6))

    play(tied_model, scenario)


@MODES
def test_a_damaged_byte_is_never_served_and_the_next_time_everything_comes(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        deltas = Deltas(stack, mode)
        await deltas.publish(2)
        new = await deltas.coming(3, corrupt=True)
        await new.begin()
        with pytest.raises(PublicationFailed) as failed:
            await new.verify()
        assert failed.value.culprits == (stack.replica.member_id,)
        await asyncio.wait([asyncio.create_task(asyncio.to_thread(_joined, new))])
        await serves(stack, 2 if mode == SHADOW else None)
        assert await deltas.lacks(await deltas.coming(3, attempt=1)) == (mode == INPLACE)
        deltas.base = ""  # the sender's snapshot is of a version that nobody holds
        _, sent = await deltas.publish(3, attempt=2)
        assert sent >= 1.0
        _, sent = await deltas.publish(4)
        assert sent < 0.2

    play(tied_model, scenario)


@MODES
def test_an_abort_leaves_the_base_where_it_was(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        deltas = Deltas(stack, mode)
        await deltas.publish(2)
        new = await deltas.coming(3, hold_after=2)
        await new.begin()
        await new.abort()
        await asyncio.wait([asyncio.create_task(asyncio.to_thread(_joined, new))])
        await serves(stack, 2 if mode == SHADOW else None)
        assert await deltas.lacks(await deltas.coming(4)) == (mode == INPLACE), "nothing was put in place"

    play(tied_model, scenario)


def test_a_version_that_came_otherwise_is_no_base(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        deltas = Deltas(stack, SHADOW)
        assert await deltas.lacks(await _with_base(deltas, f"{JOB}/0/1/0"))
        await deltas.publish(2, attempt=1)
        await publish(stack.peer, stack.replica.member_id, export(stepped(3)), 3)
        assert await deltas.lacks(await deltas.coming(4))

    play(tied_model, scenario)


async def _with_base(deltas: Deltas, base: str) -> Coming:
    deltas.base = base
    try:
        return await deltas.coming(2)
    finally:
        deltas.base = ""


def _joined(new: Coming) -> None:
    with contextlib.suppress(PublicationFailed):
        new.sender.join()
