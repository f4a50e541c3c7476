"""The ranks of test_sharded: each case's trainer publishes to three workers that are threads of rank 0."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.delta.exchange import ReceivingDeltas
from millrace.weights.transfer.pipeline import ReceivedMessages, ReceivePipeline
from millrace.weights.transfer.session import PublicationSession
from services.trainer.backends import build
from services.trainer.publication.sender import Sender
from services.trainer.ranks.world import World
from tests.layouts import whole_layout
from tests.services.trainer.backends.megatron.on_ranks import job_spec
from tests.services.trainer.publication.receiver import reference


def halves(manifest: Manifest, part: int) -> Memory:
    """A worker that wants every second half of the columns of a matrix, and vectors whole."""
    places, buffers = [], []
    for i, info in enumerate(manifest.tensors):
        offset, extent = [0] * len(info.shape), list(info.shape)
        if len(info.shape) > 1:
            half = extent[-1] // 2
            offset[-1], extent[-1] = part * half, extent[-1] - half if part else half
        places.append(Place(i, tuple(offset), tuple(extent), i, 0, row_major_strides(extent)))
        buffers.append(torch.zeros(extent, dtype=getattr(torch, info.dtype)))
    return Memory(manifest, Layout.of(places, manifest), buffers)


class Worker:
    """Receives in a thread; in the same communicator from version to version."""

    def __init__(self, memory: Memory, staged: bool, delta: bool) -> None:
        self.memory, self.staged, self.delta, self.session = memory, staged, delta, PublicationSession()
        self.failure: PublicationFailed | None = None

    def start(self, rank: int, layouts: weights_pb2.Sides, prepared: pb.PrepareSendResponse, key: str) -> None:
        plan = wire_layouts.Planner().plan(self.memory.manifest, layouts)
        assert plan.hash == prepared.plan_hash
        at = prepared.rendezvous
        rendezvous = Rendezvous(at.host, at.port, at.key, rank, at.world_size, b"", torch.device("cpu"), 20.0)
        assert at.standing == (self.session.key == at.key)
        self.receiving = ReceivePipeline(plan, rank, self.memory, staged=self.staged)
        self.base = prepared.HasField("base")
        self.session.begin()
        self.thread = threading.Thread(target=self._run, args=(rendezvous, key))
        self.thread.start()

    def _run(self, rendezvous: Rendezvous, key: str) -> None:
        try:
            self.got = self.session.run(rendezvous, key, time.monotonic() + 20.0, self._receive)
        except PublicationFailed as error:
            self.failure = error

    def _receive(self, channel: Channel) -> ReceivedMessages:
        if not self.delta:
            return self.receiving.run(channel)
        return self.receiving.run(ReceivingDeltas(channel, self.receiving.stream), onto_base=self.base)

    def end(self, checksums: list[int]) -> None:
        self.thread.join(30)
        assert self.failure is None, self.failure
        assert all(checksums[content] == value for content, value in self.got.sums.items())
        if self.staged:
            self.receiving.apply()


def case(world: World, asked: dict[str, Any]) -> dict[str, Any]:
    """Publishes three times, in bfloat16; in between every rank's weights change. Then one receiver stays away. By
    deltas the second publication finds that few elements changed, and the third that all did."""
    backend = build(job_spec(asked), world.device)
    sender = Sender(world.rank, "trainer-1")
    memory = backend.shards("bfloat16")
    computed = len(memory.computed) if memory is not None else 0
    told = sender.describe(pb.DescribeSendRequest(dtype="bfloat16"), backend)
    manifest = Manifest.from_proto(told.manifest)
    everything = whole_layout(manifest)
    empty = [torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors]
    path, delta = (weights_pb2.PATH_DELTA, True) if asked.get("delta") else (weights_pb2.PATH_SHARDED, False)
    workers = [Worker(halves(manifest, part), staged=bool(part), delta=delta) for part in (0, 1)]
    workers.append(Worker(Memory(manifest, everything, empty), staged=True, delta=delta))
    wanted = wire_layouts.encode([worker.memory.layout.boxes for worker in workers])
    layouts = weights_pb2.Sides(senders=told.layouts, receivers=wanted, message_bytes=65536)
    wrong: list[str] = []
    shares: list[float] = []
    for version in (0, 1, 2):
        ref = reference(version)
        request = pb.PrepareSendRequest(publication=ref, path=path, dtype="bfloat16", deadline_s=20.0, sides=layouts)
        prepared = sender.prepare_send(request, backend, Version(version))
        if world.rank == 0:
            for i, worker in enumerate(workers):
                worker.start(world.size + i, layouts, prepared, PublicationId.from_proto(ref).key)
        sent = sender.transfer(pb.TransferSendRequest(publication=ref), backend, Version(version))
        shares.append(sent.report.sent_bytes / manifest.bytes / 2)  # two workers want it whole
        exported = {info.name: tensor for info, tensor in backend.export("bfloat16")}
        if world.rank == 0:
            for worker in workers:
                worker.end(list(sent.checksums.values))
            for i, info in enumerate(manifest.tensors):
                expected, (left, right, all_of_it) = exported[info.name], (w.memory.buffers[i] for w in workers)
                assert expected is not None
                joined = torch.cat([left, right], dim=-1) if left.dim() > 1 else left
                if not (torch.equal(joined, expected) and torch.equal(all_of_it, expected)):
                    wrong.append(f"{info.name} of version {version}")
        sender.finish(failed=False)
        with torch.no_grad():
            for _, tensor in backend.state().items():
                for part in getattr(tensor, "parts", {0: tensor}).values():
                    if delta and version == 0:
                        local = part.to_local() if hasattr(part, "to_local") else part
                        local[..., ::50] *= 1.01
                    else:
                        part.mul_(1.5).add_(0.01)  # the matrices B of adapters begin with zeros
        backend.prepare_state(0)
    ref = reference(3)
    request.publication.CopyFrom(ref)
    request.deadline_s = 1.0
    sender.prepare_send(request, backend, Version(3))
    began = time.monotonic()
    try:
        sender.transfer(pb.TransferSendRequest(publication=ref), backend, Version(3))
    except PublicationFailed as error:
        failure = error.what
    else:
        failure = "nothing"
    late = time.monotonic() - began
    sender.finish(failed=True)
    request.publication.CopyFrom(reference(4))
    bases = [prepared.HasField("base"), sender.prepare_send(request, backend, Version(4)).HasField("base")]
    sender.close()
    dist.barrier()
    told = {"wrong": wrong, "tensors": len(manifest.tensors), "failure": failure, "late": late}
    return told | {"computed": computed, "shares": shares, "bases": bases}


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    world = World.join()
    answers = {name: case(world, asked) for name, asked in cases.items()}
    if world.rank == 0:
        (folder / "answer.json").write_text(json.dumps(answers))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
