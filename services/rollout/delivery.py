"""One publication as a receiver's ranks see it: what comes, from where, until when."""

from dataclasses import dataclass

from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.manifest import Manifest
from millrace.wire.v1 import rollout_pb2, weights_pb2


@dataclass(frozen=True)
class Delivery:
    key: str
    """Names the communicator: job, version, epoch and attempt."""
    version: Version
    manifest: Manifest
    host: str
    port: int
    world_size: int
    """Of the communicator: the sender and every worker of every receiver."""
    first_rank: int
    """Of this replica's workers, which take the ranks from here on."""
    timeout_s: float
    """For the meeting and for each operation after it."""

    @classmethod
    def from_request(cls, request: rollout_pb2.PrepareReceiveRequest) -> "Delivery":
        """Raises PublicationFailed where the manifest contradicts its own hash."""
        ref, meeting = request.publication, request.rendezvous
        try:
            manifest = Manifest.from_proto(request.manifest)
        except ValueError as error:
            raise PublicationFailed(f"{error}.", "run the same release of millrace everywhere.") from error
        return cls(
            key=f"{ref.job_id}/{ref.version}/{ref.epoch}/{ref.attempt}",
            version=Version(ref.version),
            manifest=manifest,
            host=meeting.host,
            port=meeting.port,
            world_size=meeting.world_size,
            first_rank=request.receiver.first_rank,
            timeout_s=request.deadline_s,
        )

    def encode(self) -> bytes:
        """For an engine's worker processes."""
        job, version, epoch, attempt = self.key.rsplit("/", 3)
        request = rollout_pb2.PrepareReceiveRequest(
            publication=weights_pb2.PublicationRef(
                job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt)
            ),
            manifest=self.manifest.to_proto(),
            rendezvous=weights_pb2.Rendezvous(host=self.host, port=self.port, world_size=self.world_size),
            receiver=weights_pb2.Receiver(first_rank=self.first_rank),
            deadline_s=self.timeout_s,
        )
        return request.SerializeToString()

    @classmethod
    def decode(cls, data: bytes) -> "Delivery":
        return cls.from_request(rollout_pb2.PrepareReceiveRequest.FromString(data))
