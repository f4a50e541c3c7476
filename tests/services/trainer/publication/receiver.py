"""The receiving end of a publication: rank 1 of its communicator, in a thread."""

import os
import threading

import torch

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.weights.phases import PublicationId
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.manifest import Manifest
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.checksum import checksum


class Receiver:
    """Receives every tensor of the manifest. With `tensors` it stops after so many and stays away."""

    def __init__(
        self,
        ref: weights_pb2.PublicationRef,
        prepared: pb.PrepareSendResponse,
        rank: int = 1,
        tensors: int | None = None,
    ) -> None:
        self.manifest = Manifest.from_proto(prepared.manifest)
        self._rendezvous = prepared.rendezvous
        assert gather_broadcast(self.manifest, self._rendezvous.world_size).hash == prepared.plan_hash
        self._key = PublicationId.from_proto(ref).key
        self._rank = rank
        self._count = len(self.manifest.tensors) if tensors is None else tensors
        self.received: dict[str, torch.Tensor] = {}
        self._channel: GlooChannel | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        where = self._rendezvous
        self._channel = GlooChannel.join(
            where.host, where.port, key=self._key, rank=self._rank, world_size=where.world_size, timeout_s=30.0
        )
        for info in self.manifest.tensors[: self._count]:
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            self._channel.broadcast(tensor)
            self.received[info.name] = tensor

    def wait(self) -> dict[str, torch.Tensor]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.received

    def checksums(self) -> list[int]:
        return [checksum(self.received[info.name]) for info in self.manifest.tensors]

    def close(self) -> None:
        self._thread.join(30)
        if self._channel is not None:
            self._channel.close()


def receive_and_die(ref: bytes, prepared: bytes) -> None:
    """A process that receives three tensors and is gone."""
    response = pb.PrepareSendResponse.FromString(prepared)
    Receiver(weights_pb2.PublicationRef.FromString(ref), response, tensors=3).wait()
    os._exit(0)


def reference(version: int, attempt: int = 0, epoch: int = 1, job: str = "job-1") -> weights_pb2.PublicationRef:
    return weights_pb2.PublicationRef(job_id=job, version=version, epoch=epoch, attempt=attempt)
