"""Which way a publication goes, and what everybody plans it from: the layouts of the sender's and replicas' ranks."""

from dataclasses import dataclass

from millrace.errors import MillraceError, PublicationFailed
from millrace.spec.publication import Publication as Settings
from millrace.weights.plans import wire_layouts as wire
from millrace.wire.methods import RolloutRpc
from millrace.wire.v1 import rollout_pb2, trainer_pb2, weights_pb2
from services.coordinator.publication.attempt import Attempt

MODES = {
    "auto": weights_pb2.COMMIT_MODE_UNSPECIFIED,
    "shadow": weights_pb2.COMMIT_MODE_SHADOW,
    "inplace": weights_pb2.COMMIT_MODE_INPLACE,
}


@dataclass(frozen=True)
class Way:
    """How one attempt goes."""

    path: "weights_pb2.Path"
    first_rank: int
    """Of the receivers in the communicator; the senders come before."""
    sides: weights_pb2.Sides | None = None
    manifest: weights_pb2.Manifest | None = None
    gpu: bool = False


class NoWay(MillraceError):
    """A replica cannot send here: the trainer has to."""


BROADCAST = Way(weights_pb2.PATH_GATHER_BROADCAST, first_rank=1)


class Sides:
    """Asks members for their layouts, each once: they stay the same as long as member, job and manifest do."""

    def __init__(self) -> None:
        self._sent: tuple[str, str, str, trainer_pb2.DescribeSendResponse] | None = None
        self._wanted: dict[str, tuple[str, bytes, rollout_pb2.DescribeReceiveResponse]] = {}
        self.agreed: dict[str, bytes] = {}
        """The plan that each receiver agreed to last: naming it is enough."""

    async def way(self, attempt: Attempt, dtype: str, settings: Settings) -> Way:
        """Raises PublicationFailed where the job asks for a path that somebody cannot go, NoWay where only the trainer
        can go the one that is left."""
        if settings.path == "gather_broadcast":
            return _broadcast(attempt)
        sender = await self._sender(attempt, dtype)
        members = {m.id: m for m in attempt.receivers}
        self._wanted = {member: told for member, told in self._wanted.items() if member in members}
        wanted = await self._receivers(attempt, sender.manifest) if sender.layouts.of_rank else {}
        if unable := [attempt.sender.id] * (not sender.layouts.of_rank) + [
            member for member, told in wanted.items() if not told.layouts.of_rank or told.gpu != sender.gpu
        ]:
            if settings.path == "auto":
                return _broadcast(attempt)
            what = f"{', '.join(unable)} cannot take part in a sharded publication of this job."
            raise PublicationFailed(what, 'set publication.path to "auto".', tuple(unable))
        receivers = wire.joined([wanted[m.id].layouts for m in attempt.receivers])
        sides = weights_pb2.Sides(senders=sender.layouts, receivers=receivers)
        return Way(weights_pb2.PATH_SHARDED, len(sender.layouts.of_rank), sides, sender.manifest, sender.gpu)

    def forget(self) -> None:
        """After a failure: whoever failed may hold something else than was told."""
        self._sent, self._wanted, self.agreed = None, {}, {}

    async def _sender(self, attempt: Attempt, dtype: str) -> trainer_pb2.DescribeSendResponse:
        key = (attempt.sender.id, attempt.ref.job_id, dtype)
        if self._sent is None or self._sent[:3] != key:
            request = trainer_pb2.DescribeSendRequest(job_id=attempt.ref.job_id, dtype=dtype)
            self._sent = (*key, await attempt.ask_sender(attempt.sender.methods.describe, request))
        return self._sent[3]

    async def _receivers(
        self, attempt: Attempt, manifest: weights_pb2.Manifest
    ) -> dict[str, rollout_pb2.DescribeReceiveResponse]:
        job = attempt.ref.job_id
        known = {i: told for i, (of, digest, told) in self._wanted.items() if (of, digest) == (job, manifest.hash)}
        new = [m for m in attempt.receivers if m.id not in known]
        request = rollout_pb2.DescribeReceiveRequest(job_id=job, manifest=manifest)
        for member, told in (await attempt.ask_all(RolloutRpc.DescribeWeights, lambda _: request, new)).items():
            self._wanted[member], known[member] = (job, manifest.hash, told), told
        return known


def _broadcast(attempt: Attempt) -> Way:
    if attempt.sender.source == "sibling":
        raise NoWay(f"{attempt.sender.id} cannot gather and broadcast.", "let the trainer publish.")
    return BROADCAST
