"""One publication as a replica's ranks see it: what comes or goes, where they meet, until when."""

from dataclasses import dataclass

from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.plans.manifest import Manifest
from millrace.wire.v1 import rollout_pb2, weights_pb2


@dataclass(frozen=True)
class KnownPlan:
    """What deliveries by one plan have in common. It is told once; after that the plan's hash stands for it."""

    plan_hash: bytes
    manifest: Manifest
    sides: weights_pb2.Sides | None

    @classmethod
    def of(cls, transfer_request: "TransferRequest") -> "KnownPlan":
        return cls(transfer_request.plan_hash, transfer_request.manifest, transfer_request.sides)


NO_PLAN = KnownPlan(b"", Manifest(()), None)


@dataclass(frozen=True)
class TransferRequest:
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
    communicator: str = ""
    """Names the communicator of a sharded publication, which may outlive it."""
    already_joined: bool = False
    """Everybody is in that communicator already."""
    leave_after: bool = False
    """Everybody leaves that communicator once the bytes are there."""
    nccl_id: bytes = b""
    mode: "weights_pb2.CommitMode" = weights_pb2.COMMIT_MODE_UNSPECIFIED
    plan_hash: bytes = b""

    @classmethod
    def from_request(cls, request: rollout_pb2.PrepareReceiveRequest, known: KnownPlan) -> "TransferRequest | None":
        """None where it only names a plan that is not the one that is known. Raises PublicationFailed where the
        manifest contradicts its own hash."""
        ref, meeting = request.publication, request.rendezvous
        if request.HasField("manifest"):
            try:
                manifest = Manifest.from_proto(request.manifest)
            except ValueError as error:
                raise PublicationFailed(f"{error}.", "run the same release of millrace everywhere.") from error
            sides = request.sides if request.path == weights_pb2.PATH_SHARDED else None
        elif request.plan_hash and request.plan_hash == known.plan_hash:
            manifest, sides = known.manifest, known.sides
        else:
            return None
        return cls(
            key=f"{ref.job_id}/{ref.version}/{ref.epoch}/{ref.attempt}",
            version=Version(ref.version),
            manifest=manifest,
            host=meeting.host,
            port=meeting.port,
            world_size=meeting.world_size,
            first_rank=request.receiver.first_rank,
            timeout_s=request.deadline_s,
            sides=sides,
            communicator=meeting.key,
            already_joined=meeting.standing,
            leave_after=meeting.passing,
            nccl_id=meeting.nccl_id,
            mode=request.mode,
            plan_hash=request.plan_hash,
        )

    def encode(self, *, whole: bool = True) -> bytes:
        """For an engine's worker processes; to those that know the plan it is enough to name it."""
        job, version, epoch, attempt = self.key.rsplit("/", 3)
        request = rollout_pb2.PrepareReceiveRequest(
            publication=weights_pb2.PublicationRef(
                job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt)
            ),
            manifest=self.manifest.to_proto() if whole else None,
            path=weights_pb2.PATH_SHARDED if self.sides is not None else weights_pb2.PATH_GATHER_BROADCAST,
            rendezvous=weights_pb2.Rendezvous(
                host=self.host,
                port=self.port,
                world_size=self.world_size,
                key=self.communicator,
                standing=self.already_joined,
                passing=self.leave_after,
                nccl_id=self.nccl_id,
            ),
            sides=self.sides if whole else None,
            mode=self.mode,
            plan_hash=self.plan_hash,
            receiver=weights_pb2.Receiver(first_rank=self.first_rank),
            deadline_s=self.timeout_s,
        )
        return request.SerializeToString()

    @classmethod
    def decode(cls, data: bytes, known: KnownPlan) -> "TransferRequest | None":
        return cls.from_request(rollout_pb2.PrepareReceiveRequest.FromString(data), known)


def stages(transfer_request: TransferRequest, fits: bool) -> bool:
    """Whether a sharded transfer is received beside generation: as it says, or else where the memory is there."""
    if transfer_request.mode == weights_pb2.COMMIT_MODE_UNSPECIFIED:
        return fits
    return transfer_request.mode == weights_pb2.COMMIT_MODE_SHADOW


def mode_of(staged: bool) -> "weights_pb2.CommitMode":
    return weights_pb2.COMMIT_MODE_SHADOW if staged else weights_pb2.COMMIT_MODE_INPLACE
