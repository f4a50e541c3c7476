"""One publication as a replica's ranks see it: what comes or goes, where they meet, until when."""

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
    """Of this replica's workers, which take the ranks from here on; 0 where they send."""
    timeout_s: float
    """For the meeting and for each operation after it."""
    sides: weights_pb2.Sides | None = None
    """Of a sharded publication."""
    channel: str = ""
    """Names the communicator of a sharded publication, which may outlive it."""
    standing: bool = False
    """Everybody is in that communicator already."""
    passing: bool = False
    """Everybody leaves that communicator once the bytes are there."""
    nccl_id: bytes = b""
    mode: "weights_pb2.CommitMode" = weights_pb2.COMMIT_MODE_UNSPECIFIED

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
            sides=request.sides if request.path == weights_pb2.PATH_SHARDED else None,
            channel=meeting.key,
            standing=meeting.standing,
            passing=meeting.passing,
            nccl_id=meeting.nccl_id,
            mode=request.mode,
        )

    def encode(self) -> bytes:
        """For an engine's worker processes."""
        job, version, epoch, attempt = self.key.rsplit("/", 3)
        request = rollout_pb2.PrepareReceiveRequest(
            publication=weights_pb2.PublicationRef(
                job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt)
            ),
            manifest=self.manifest.to_proto(),
            path=weights_pb2.PATH_SHARDED if self.sides is not None else weights_pb2.PATH_GATHER_BROADCAST,
            rendezvous=weights_pb2.Rendezvous(
                host=self.host,
                port=self.port,
                world_size=self.world_size,
                key=self.channel,
                standing=self.standing,
                passing=self.passing,
                nccl_id=self.nccl_id,
            ),
            sides=self.sides,
            mode=self.mode,
            receiver=weights_pb2.Receiver(first_rank=self.first_rank),
            deadline_s=self.timeout_s,
        )
        return request.SerializeToString()

    @classmethod
    def decode(cls, data: bytes) -> "Delivery":
        return cls.from_request(rollout_pb2.PrepareReceiveRequest.FromString(data))


def stages(delivery: Delivery, fits: bool) -> bool:
    """Whether a sharded delivery is received beside generation: as it says, or else where the memory is there."""
    if delivery.mode == weights_pb2.COMMIT_MODE_UNSPECIFIED:
        return fits
    return delivery.mode == weights_pb2.COMMIT_MODE_SHADOW


def mode_of(staged: bool) -> "weights_pb2.CommitMode":
    return weights_pb2.COMMIT_MODE_SHADOW if staged else weights_pb2.COMMIT_MODE_INPLACE
