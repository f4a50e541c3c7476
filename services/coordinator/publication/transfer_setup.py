"""The setup of a transfer: which path the weights take, and the layouts that its plan is made from."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, trainer_pb2, weights_pb2
from millrace.errors import MillraceError, PublicationFailed
from millrace.spec.schedule import Publication as Settings
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Content
from services.coordinator.publication.attempt import Attempt
from services.coordinator.state.member import Member

MODES = {
    "auto": weights_pb2.COMMIT_MODE_UNSPECIFIED,
    "shadow": weights_pb2.COMMIT_MODE_SHADOW,
    "inplace": weights_pb2.COMMIT_MODE_INPLACE,
}


class SiblingCannotSend(MillraceError):
    """A replica cannot send these weights by any path; the trainer has to."""


@dataclass(frozen=True)
class TransferSetup:
    """How one attempt moves the weights. It makes the PREPARE requests, so that nothing else depends on the path."""

    path: weights_pb2.Path
    senders: int
    """Ranks that send; the receivers' ranks follow them in the communicator."""
    dtype: str
    layouts: weights_pb2.Sides | None = None
    """What each rank holds or wants; None if whole tensors are broadcast."""
    manifest: weights_pb2.Manifest | None = None
    """The manifest of the layouts; None if the sender gives it in PREPARE."""
    gpu: bool = False

    @property
    def delta(self) -> bool:
        """Whether only changes are sent, if the members agree on what they changed from."""
        return self.path == weights_pb2.PATH_DELTA

    def ranks(self, receivers: Sequence[Member]) -> dict[str, weights_pb2.Receiver]:
        """Each receiver's ranks in the communicator, by member id."""
        ranks: dict[str, weights_pb2.Receiver] = {}
        first = self.senders
        for member in receivers:
            world_size = member.configured.world_size if member.configured else member.world_size
            ranks[member.id] = weights_pb2.Receiver(member_id=member.id, first_rank=first, world_size=world_size)
            first += world_size
        return ranks

    def prepare_send(self, attempt: Attempt) -> trainer_pb2.PrepareSendRequest:
        """The sender's PREPARE."""
        return trainer_pb2.PrepareSendRequest(
            publication=attempt.ref,
            path=self.path,
            receivers=self.ranks(attempt.receivers).values(),
            dtype=self.dtype,
            deadline_s=attempt.sender_s,
            sides=self.layouts,
            gpu=self.gpu,
            content=attempt.content.value,
        )

    def prepare_receive(
        self,
        attempt: Attempt,
        prepared: trainer_pb2.PrepareSendResponse,
        receiver: weights_pb2.Receiver,
        *,
        knows_plan: bool,
        deadline_s: float,
        mode: weights_pb2.CommitMode,
    ) -> rollout_pb2.PrepareReceiveRequest:
        """A receiver's PREPARE, after the sender's answer. One that knows the plan gets its hash only, and begins to
        receive if it is in the communicator already: nobody has to wait for it there."""
        return rollout_pb2.PrepareReceiveRequest(
            publication=attempt.ref,
            path=self.path,
            manifest=None if knows_plan else self.manifest or prepared.manifest,
            rendezvous=prepared.rendezvous,
            receiver=receiver,
            plan_hash=prepared.plan_hash,
            deadline_s=deadline_s,
            sides=None if knows_plan else self.layouts,
            mode=mode,
            begin=knows_plan and prepared.rendezvous.standing,
            base=prepared.base if prepared.HasField("base") else None,
        )


@dataclass(frozen=True)
class JoinedLayouts:
    """What the members answer, and the layouts of all ranks that follow from it."""

    sender: trainer_pb2.DescribeSendResponse
    receivers: Sequence[rollout_pb2.DescribeReceiveResponse]
    layouts: weights_pb2.Sides


class MemberLayouts:
    """The members' layouts for one content, from which it chooses each attempt's setup. Each member is asked once: a
    layout stays the same as long as member, job and manifest do."""

    def __init__(self) -> None:
        self._sender: tuple[str, str, str, trainer_pb2.DescribeSendResponse] | None = None
        """Member, job and dtype that were asked for, and the answer."""
        self._receivers: dict[str, tuple[str, bytes, rollout_pb2.DescribeReceiveResponse]] = {}
        """For each member: job and hash of the manifest that were asked for, and the answer."""
        self._last_joined: JoinedLayouts | None = None
        self.agreed_plans: dict[str, bytes] = {}
        """Hash of the plan that each receiver agreed to last; it is enough to name that plan."""
        self.path_choice = PathChoice()

    async def setup(self, attempt: Attempt, settings: Settings) -> TransferSetup:
        """Chooses by what the job asks for and what the members can do.

        Raises PublicationFailed if the job asks for a path that a member cannot take, SiblingCannotSend if the
        only path left is one that a sibling cannot send by.
        """
        dtype = _common_dtype(attempt.receivers)
        if settings.path == "gather_broadcast":
            return _gather_broadcast(attempt, dtype)
        sender = await self._described_sender(attempt, dtype)
        members = {m.id: m for m in attempt.receivers}
        self._receivers = {member: known for member, known in self._receivers.items() if member in members}
        has_layouts = bool(sender.layouts.of_rank)
        receivers = await self._described_receivers(attempt, sender.manifest) if has_layouts else {}
        unable = [] if has_layouts else [attempt.sender.id]
        unable += [m for m, answer in receivers.items() if not answer.layouts.of_rank or answer.gpu != sender.gpu]
        if unable:
            if settings.path == "auto":
                return _gather_broadcast(attempt, dtype)
            what = f"{', '.join(unable)} cannot take part in a sharded publication of this job."
            raise PublicationFailed(what, 'set publication.path to "auto".', tuple(unable))
        layouts = self._joined(sender, [receivers[m.id] for m in attempt.receivers])
        ranks = len(sender.layouts.of_rank)
        able = sender.deltas and all(answer.deltas for answer in receivers.values())
        delta = able and self._wants_delta(attempt, settings)
        path = weights_pb2.PATH_DELTA if delta else weights_pb2.PATH_SHARDED
        return TransferSetup(path, ranks, dtype, layouts, sender.manifest, sender.gpu)

    def _wants_delta(self, attempt: Attempt, settings: Settings) -> bool:
        """Whether the changes of whole weights are to be sent. An adapter is small, the base of one never changes, and
        a sibling has kept nothing to compare with."""
        if attempt.content is not Content.MODEL or attempt.sender.is_copy:
            return False
        return settings.path == "delta" or (settings.path == "auto" and self.path_choice.delta)

    def _joined(
        self, sender: trainer_pb2.DescribeSendResponse, receivers: list[rollout_pb2.DescribeReceiveResponse]
    ) -> weights_pb2.Sides:
        """The layouts of all ranks. They are joined again only if a member has come, gone or changed."""
        known = self._last_joined
        if known is None or known.sender is not sender or not _same(known.receivers, receivers):
            wanted = wire_layouts.joined([answer.layouts for answer in receivers])
            layouts = weights_pb2.Sides(senders=sender.layouts, receivers=wanted)
            known = self._last_joined = JoinedLayouts(sender, receivers, layouts)
        return known.layouts

    def forget(self) -> None:
        """Forgets all answers, after a failure: a member that failed may hold something else now."""
        self._sender, self._last_joined, self._receivers, self.agreed_plans = None, None, {}, {}

    async def _described_sender(self, attempt: Attempt, dtype: str) -> trainer_pb2.DescribeSendResponse:
        key = (attempt.sender.id, attempt.ref.job_id, dtype)
        if self._sender is None or self._sender[:3] != key:
            request = trainer_pb2.DescribeSendRequest(
                job_id=attempt.ref.job_id, dtype=dtype, content=attempt.content.value
            )
            self._sender = (*key, await attempt.ask_sender(attempt.sender.methods.describe, request))
        return self._sender[3]

    async def _described_receivers(
        self, attempt: Attempt, manifest: weights_pb2.Manifest
    ) -> dict[str, rollout_pb2.DescribeReceiveResponse]:
        job = attempt.ref.job_id
        known = {
            i: answer for i, (of, digest, answer) in self._receivers.items() if (of, digest) == (job, manifest.hash)
        }
        new = [m for m in attempt.receivers if m.id not in known]
        request = rollout_pb2.DescribeReceiveRequest(job_id=job, manifest=manifest)
        distinct = {answer.SerializeToString(deterministic=True): answer for answer in known.values()} if new else {}
        for member, answer in (await attempt.ask_all(RolloutRpc.DescribeWeights, lambda _: request, new)).items():
            # Most members have the same layouts, which may be large: they are kept once.
            shared = distinct.setdefault(answer.SerializeToString(deterministic=True), answer)
            self._receivers[member], known[member] = (job, manifest.hash, shared), shared
        return known


def _same(
    some: Sequence[rollout_pb2.DescribeReceiveResponse], others: Sequence[rollout_pb2.DescribeReceiveResponse]
) -> bool:
    """Whether these are the same objects. Comparing what they hold would cost as much as joining them."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _gather_broadcast(attempt: Attempt, dtype: str) -> TransferSetup:
    if not attempt.sender.can_gather:
        raise SiblingCannotSend(f"{attempt.sender.id} cannot gather and broadcast.", "let the trainer publish.")
    return TransferSetup(weights_pb2.PATH_GATHER_BROADCAST, 1, dtype)


def _common_dtype(receivers: Sequence[Member]) -> str:
    """The dtype that the engines hold. Raises PublicationFailed if they differ; the minority are the culprits."""
    by_dtype: dict[str, list[str]] = {}
    for member in receivers:
        by_dtype.setdefault(member.configured.dtype if member.configured else "", []).append(member.id)
    dtype, *others = sorted(by_dtype, key=lambda name: -len(by_dtype[name]))
    if others:
        culprits = tuple(member for other in others for member in by_dtype[other])
        what = f"the replicas' engines hold different dtypes: {by_dtype}."
        raise PublicationFailed(what, "start every replica with the job's rollout.dtype.", culprits)
    return dtype


WORTH_S = 1.0
"""Seconds of a whole transfer below which deltas are not tried: a delta takes host memory on the trainer."""
TRY_AGAIN_AFTER = 50
"""Publications of whole weights after which deltas are tried again, if they were slower."""


@dataclass
class PathChoice:
    """The choice for one content, learned from the seconds of each transfer. Links change, and so does the number of
    elements that a step changes: always the last seconds count."""

    whole_s: float | None = None
    """Seconds of the last transfer of whole weights."""
    delta_s: float | None = None
    """Seconds of the last transfer of changes; None before the first."""
    since: int = 0
    """Transfers of whole weights since deltas were found to be slower."""

    @property
    def delta(self) -> bool:
        """Whether the next publication sends changes. The first that does still sends everything, and keeps it."""
        if self.whole_s is None or self.whole_s < WORTH_S:
            return False
        return self.delta_s is None or self.delta_s < self.whole_s or self.since >= TRY_AGAIN_AFTER

    def learn(self, transfer_s: float, *, whole: bool) -> None:
        """A transfer is over; `whole`: it sent everything."""
        if whole:
            self.whole_s = transfer_s
            self.since += 1
        else:
            self.delta_s = transfer_s
            self.since = 0
