"""Publications of a trainer's ranks by their handlers, received by a worker that wants everything."""

from typing import Any

import pytest
import torch

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import OutOfMemory, PublicationFailed
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.pipeline import SendPipeline, SlotRing
from services.trainer.ranks import collectives
from services.trainer.service.worker import Worker
from tests.layouts import whole_layout
from tests.services.trainer.publication import shard_ranks
from tests.services.trainer.publication.receiver import reference

SHARDED, GATHERED = weights_pb2.PATH_SHARDED, weights_pb2.PATH_GATHER_BROADCAST


class Publications:
    """Attempts to publish version 0."""

    def __init__(self, rank: Worker) -> None:
        self.rank = rank
        self.attempts = 0
        self.sides = weights_pb2.Sides()
        self.receiver: shard_ranks.Worker | None = None
        self.receiving = False

    def describe(self) -> None:
        """The layouts of both sides, and on rank 0 a receiver."""
        told = self.rank.describe(pb.DescribeSendRequest(job_id="job-1", dtype="bfloat16"))
        manifest = Manifest.from_proto(told.manifest)
        empty = [torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors]
        memory = Memory(manifest, whole_layout(manifest), empty)
        wanted = wire_layouts.encode([memory.layout.boxes])
        self.sides = weights_pb2.Sides(senders=told.layouts, receivers=wanted, message_bytes=65536)
        if collectives.rank() == 0:
            self.receiver = shard_ranks.Worker(memory, staged=False, delta=False)

    def attempt(self, path: weights_pb2.Path = SHARDED) -> list[torch.Tensor]:
        """All phases; what the receiver holds then, on rank 0. After a failure the ranks are told of the end."""
        self.attempts, self.receiving = self.attempts + 1, False
        ref = reference(0, attempt=self.attempts)
        try:
            self.describe()
            receivers = [weights_pb2.Receiver(member_id="r", first_rank=2, world_size=1)] if path == SHARDED else []
            request = pb.PrepareSendRequest(
                publication=ref, path=path, dtype="bfloat16", deadline_s=20.0, sides=self.sides, receivers=receivers
            )
            prepared = self.rank.prepare(request)
            if path == SHARDED and self.receiver is not None:
                first = collectives.world_size()
                self.receiver.start(first, self.sides, prepared, PublicationId.from_proto(ref).key)
                self.receiving = True
            sent = self.rank.transfer(pb.TransferSendRequest(publication=ref))
        except (PublicationFailed, OutOfMemory):
            if self.receiver is not None and self.receiving:
                self.receiver.thread.join(30)  # the end of the sender would hide why the transfer failed
            self.rank._sender.finish(failed=True)
            raise
        self.rank._sender.finish(failed=False)
        if path != SHARDED or self.receiver is None:
            return []
        self.receiver.end(list(sent.checksums.values))
        return list(self.receiver.memory.buffers)

    def wrong(self, received: list[torch.Tensor]) -> list[str]:
        """The tensors that are not what gathering gives."""
        exported = list(self.rank._loaded().backend.export("bfloat16"))
        if self.receiver is None:
            return []
        pairs = zip(exported, received, strict=True)
        return [info.name for (info, tensor), other in pairs if tensor is None or not torch.equal(tensor, other)]


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def without_memory(patch: pytest.MonkeyPatch, phase: str, rank: Worker) -> None:
    """From now on there is no memory for a phase of publications on this rank."""
    match phase:
        case "describe":
            patch.setattr(rank._loaded().backend, "shards", no_memory)
        case "prepare":
            patch.setattr(SlotRing, "__init__", no_memory)
        case "transfer":
            patch.setattr(SendPipeline, "run", no_memory)
        case "gather":
            patch.setattr(rank._loaded().backend, "export", no_memory)
