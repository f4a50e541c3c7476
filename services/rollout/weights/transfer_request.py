"""The request for one transfer of weights: what comes or goes, by which path, where the ranks meet, until when."""

from dataclasses import dataclass, field

from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.phases import PublicationId
from millrace.weights.plans.manifest import Manifest

PREPARE_AGAIN = "prepare it again with a new attempt."


def nothing_prepared() -> PublicationFailed:
    """The error for a phase whose transfer was aborted, or never prepared."""
    return PublicationFailed("the publication was aborted.", PREPARE_AGAIN)


@dataclass(frozen=True)
class KnownPlan:
    """What a member keeps of the plan that it agreed to last: later requests only give the plan's hash."""

    plan_hash: bytes
    manifest: Manifest
    layouts: weights_pb2.Sides


NO_PLAN = KnownPlan(b"", Manifest(()), weights_pb2.Sides())


@dataclass(frozen=True)
class TransferRequest:
    """One transfer as the ranks of a replica see it. A replica that receives and a replica that sends to a sibling
    both pass it to the workers of their engine."""

    key: str
    """Names the publication: job, version, epoch and attempt."""
    version: Version
    manifest: Manifest
    host: str
    port: int
    """Host and port are those of the store where the communicator's ranks meet."""
    world_size: int
    """Ranks of the communicator: all senders and every worker of every receiver."""
    first_rank: int
    """Rank of this replica's first worker in the communicator; its other workers follow. 0 if they send."""
    timeout_s: float
    """Limits the joining of the communicator and each operation after it."""
    path: "weights_pb2.Path"
    layouts: weights_pb2.Sides = field(default_factory=weights_pb2.Sides)
    """The boxes that each sender holds and each receiver wants; empty if the path does not use them."""
    communicator: str = ""
    """Names the communicator of a sharded transfer, which may live longer than the transfer."""
    already_joined: bool = False
    """All ranks are in that communicator from an earlier transfer."""
    leave_after: bool = False
    """All ranks leave that communicator when the transfer ends."""
    nccl_id: bytes = b""
    """NCCL's unique id; empty if the ranks meet over Gloo."""
    mode: "weights_pb2.CommitMode" = weights_pb2.COMMIT_MODE_UNSPECIFIED
    """How the version is put in place; unspecified: shadow if the memory allows it."""
    plan_hash: bytes = b""
    base: str = ""
    """Key of the publication that is in place here, and that changes may be sent against; empty: everything is sent."""

    @classmethod
    def from_proto(cls, request: rollout_pb2.PrepareReceiveRequest, known: KnownPlan) -> "TransferRequest | None":
        """None if the request only gives the hash of a plan, and `known` is another plan. Raises PublicationFailed
        if the manifest contradicts its own hash."""
        publication, rendezvous = PublicationId.from_proto(request.publication), request.rendezvous
        if request.HasField("manifest"):
            try:
                manifest = Manifest.from_proto(request.manifest)
            except ValueError as error:
                raise PublicationFailed(f"{error}.", "run the same release of millrace everywhere.") from error
            layouts = request.sides
        elif request.plan_hash and request.plan_hash == known.plan_hash:
            manifest, layouts = known.manifest, known.layouts
        else:
            return None
        return cls(
            key=publication.key,
            version=publication.version,
            manifest=manifest,
            host=rendezvous.host,
            port=rendezvous.port,
            world_size=rendezvous.world_size,
            first_rank=request.receiver.first_rank,
            timeout_s=request.deadline_s,
            path=request.path,
            layouts=layouts,
            communicator=rendezvous.key,
            already_joined=rendezvous.standing,
            leave_after=rendezvous.passing,
            nccl_id=rendezvous.nccl_id,
            mode=request.mode,
            plan_hash=request.plan_hash,
            base=PublicationId.from_proto(request.base).key if request.HasField("base") else "",
        )

    def encode(self, *, whole: bool = True) -> bytes:
        """The bytes for an engine's workers. Without `whole`, manifest and layouts are left out: the workers know the
        plan."""
        request = rollout_pb2.PrepareReceiveRequest(
            publication=_reference(self.key),
            manifest=self.manifest.to_proto() if whole else None,
            path=self.path,
            rendezvous=weights_pb2.Rendezvous(
                host=self.host,
                port=self.port,
                world_size=self.world_size,
                key=self.communicator,
                standing=self.already_joined,
                passing=self.leave_after,
                nccl_id=self.nccl_id,
            ),
            sides=self.layouts if whole else None,
            mode=self.mode,
            plan_hash=self.plan_hash,
            receiver=weights_pb2.Receiver(first_rank=self.first_rank),
            deadline_s=self.timeout_s,
            base=_reference(self.base) if self.base else None,
        )
        return request.SerializeToString()

    @classmethod
    def decode(cls, data: bytes, known: KnownPlan = NO_PLAN) -> "TransferRequest | None":
        """The request that `encode` wrote; None as `from_proto`."""
        return cls.from_proto(rollout_pb2.PrepareReceiveRequest.FromString(data), known)

    def aborted(self) -> PublicationFailed:
        """The error of whoever waits for this transfer when it is aborted."""
        return PublicationFailed(f"publication {self.key} was aborted.", PREPARE_AGAIN)

    @property
    def known_plan(self) -> KnownPlan:
        return KnownPlan(self.plan_hash, self.manifest, self.layouts)


def _reference(key: str) -> weights_pb2.PublicationRef:
    """The publication that a key names."""
    job, version, epoch, attempt = key.rsplit("/", 3)
    return weights_pb2.PublicationRef(job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt))
