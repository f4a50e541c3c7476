"""One weight sync: PREPARE, TRANSFER, VERIFY, COMMIT over who sends, the trainer or a sibling, and the replicas that
receive.

Who fails before the weights have arrived is cut out and the survivors are tried again; who fails after that is cut out
alone. A replica that is cut out joins again with a publication, or a copy, of its own.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from millrace import events
from millrace.errors import PublicationFailed
from millrace.wire.methods import RolloutRpc
from millrace.wire.v1 import rollout_pb2, trainer_pb2, weights_pb2
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.trainer import Trainer, TrainerLost
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.publication.attempt import Attempt
from services.coordinator.publication.layouts import MODES, Sides
from services.coordinator.publication.report import Report
from services.coordinator.publication.senders import FromSibling, FromTrainer, Sender
from services.coordinator.state.job import JobRecord
from services.coordinator.state.member import Member, Weights
from services.coordinator.store import Store

log = structlog.get_logger(__name__)
BLAMELESS_FAILURES = 3
"""A publication fails for good when so many attempts failed and no replica was to blame."""
COMMIT_S = 10.0
"""For COMMIT, at least, where the other phases have used up the time."""


class Publisher:
    def __init__(
        self, store: Store, fleet: Fleet, trainer: Trainer, events: Events, prometheus: PrometheusMetrics
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._trainer = trainer
        self._events = events
        self._prometheus = prometheus
        self._sides = Sides()
        self.publishing = False
        """Whether the trainer's version is on its way."""
        self._copying: asyncio.Task[Report] | None = None
        self._loose: set[asyncio.Task[None]] = set()
        """Calls that nobody waits for."""

    async def publish(self, job: JobRecord, receivers: Sequence[Member]) -> Report:
        """Brings the trainer's version to `receivers`; those that fail are cut out. Needs the trainer's turn.

        A copy that is under way is ended first: whoever was to get it is served here, or joins again. Raises
        TrainerLost, and PublicationFailed where it fails and no replica is to blame.
        """
        if not receivers:
            return Report.nobody(job.version)
        self.publishing = True
        try:
            if self._copying is not None:
                self._copying.cancel()
                await asyncio.wait([self._copying])
            sender = FromTrainer(self._trainer)
            return await self._brought(job, receivers, sender, self._sides, BLAMELESS_FAILURES)
        finally:
            self.publishing = False

    async def copy(self, job: JobRecord, sibling: Member, receivers: Sequence[Member]) -> Report | None:
        """Brings `receivers` the version from `sibling`, which serves it; the trainer has no part in it. None where a
        publication came first. Raises PublicationFailed where it fails and no receiver is to blame, NoWay where the
        sibling cannot send."""
        if self.publishing or self._copying is not None:
            return None
        sender = FromSibling(sibling, self._fleet)
        copying = self._copying = asyncio.create_task(self._brought(job, receivers, sender, Sides(), 1))
        try:
            await asyncio.wait([copying])
            return None if copying.cancelled() else copying.result()
        finally:
            copying.cancel()
            self._copying = None

    async def _brought(
        self, job: JobRecord, receivers: Sequence[Member], sender: Sender, sides: Sides, tries: int
    ) -> Report:
        """`tries`: after so many failures without anybody to blame it fails for good."""
        started, failures, blameless = time.monotonic(), 0, 0
        while left := [m for m in receivers if m.ready_for(job.id)]:
            attempt = await self._begin(job, left, sender)
            try:
                reports = await self._phases(job, attempt, sides)
            except TrainerLost as error:
                await attempt.abort(left, error.what)
                raise
            except PublicationFailed as error:
                culprits = attempt.culprits(error)
                sides.forget()
                await self._failed(job, attempt, error, culprits)
                failures += 1
                blameless += not culprits
                if blameless == tries:
                    raise
                receivers = [m for m in left if m not in culprits]
            except asyncio.CancelledError:
                if attempt.sender.source == "sibling":  # something newer ended the copy: both ends are told
                    reason = "a publication came first"
                    attempt.let_go(attempt.finish(reason), attempt.abort(attempt.receivers, reason))
                raise
            else:
                return await self._done(job, attempt, reports, time.monotonic() - started, failures)
        return Report.nobody(job.version)

    async def _begin(self, job: JobRecord, receivers: list[Member], sender: Sender) -> Attempt:
        number = await self._store.jobs.next_attempt(job.id)
        ref = weights_pb2.PublicationRef(job_id=job.id, version=job.version, epoch=self._fleet.epoch, attempt=number)
        deadline = asyncio.get_running_loop().time() + job.spec.deadlines.publication_s
        return Attempt(ref, receivers, deadline, self._fleet, sender, loose=self._loose)

    async def _phases(self, job: JobRecord, attempt: Attempt, sides: Sides) -> list[weights_pb2.MemberReport]:
        """Answers the sender's report and those of the receivers that serve the version now.

        Raises PublicationFailed with the culprits of PREPARE and TRANSFER; later ones are cut out on the way.
        """
        try:
            async with asyncio.timeout_at(attempt.deadline):
                await attempt.timed("prepare", self._prepare(job, attempt, sides))
                sent = await attempt.timed("transfer", self._transfer(attempt))
        except TimeoutError as error:
            late, seconds = tuple(attempt.unanswered), job.spec.deadlines.publication_s
            if attempt.phase == "transfer" and set(late) <= {attempt.sender.id}:  # it waits for a receiver
                late = await attempt.suspects() or late
            what = f"{attempt.phase} was not over after {seconds:g} s: {', '.join(late)} did not answer."
            raise PublicationFailed(what, "look at their logs, or raise deadlines.publication_s.", late) from error
        await attempt.timed("verify", self._verify(attempt, sent))
        return [sent.report, *await attempt.timed("commit", self._commit(job, attempt))]

    async def _prepare(self, job: JobRecord, attempt: Attempt, sides: Sides) -> None:
        dtype, settings = _dtype(attempt.receivers), job.spec.publication
        way = await sides.way(attempt, dtype, settings)
        receivers = _ranks(attempt.receivers, way.first_rank)
        request = trainer_pb2.PrepareSendRequest(
            publication=attempt.ref,
            path=way.path,
            receivers=receivers.values(),
            dtype=dtype,
            deadline_s=attempt.sender_s,
            sides=way.sides,
            gpu=way.gpu,
        )
        attempt.prepared = True
        prepared = await attempt.ask_sender(attempt.sender.methods.prepare, request)
        plan_hash, manifest = prepared.plan_hash, way.manifest or prepared.manifest

        def receive(member: Member, whole: bool) -> rollout_pb2.PrepareReceiveRequest:
            return rollout_pb2.PrepareReceiveRequest(
                publication=attempt.ref,
                path=way.path,
                manifest=manifest if whole else None,
                rendezvous=prepared.rendezvous,
                receiver=receivers[member.id],
                plan_hash=plan_hash,
                deadline_s=attempt.left_s + COMMIT_S,
                sides=way.sides if whole else None,
                mode=MODES[settings.commit],
            )

        agreed = sides.agreed
        prepare = RolloutRpc.PreparePublication
        answers = await attempt.ask_all(prepare, lambda m: receive(m, agreed.get(m.id) != plan_hash))
        forgetful = [m for m in attempt.receivers if not answers[m.id].plan_hash]
        answers |= await attempt.ask_all(prepare, lambda m: receive(m, True), forgetful)
        sides.agreed = {member: answer.plan_hash for member, answer in answers.items()}
        if differing := tuple(i for i, answer in answers.items() if answer.plan_hash != prepared.plan_hash):
            what = f"{', '.join(differing)} worked out another plan than {attempt.sender.id}."
            raise PublicationFailed(what, "run the same release of millrace everywhere.", differing)

    async def _transfer(self, attempt: Attempt) -> trainer_pb2.TransferSendResponse:
        """The receivers begin to receive, then the sender sends until the last byte is out or a receiver is lost."""
        receive = rollout_pb2.TransferReceiveRequest(publication=attempt.ref)
        await attempt.ask_all(RolloutRpc.TransferPublication, lambda _: receive)
        send = trainer_pb2.TransferSendRequest(publication=attempt.ref)
        sending = asyncio.create_task(attempt.ask_sender(attempt.sender.methods.transfer, send))
        losses = [asyncio.create_task(m.gone.wait(), name=m.id) for m in attempt.receivers]
        try:
            await asyncio.wait({sending, *losses}, return_when=asyncio.FIRST_COMPLETED)
            if lost := tuple(task.get_name() for task in losses if task.done()):
                raise PublicationFailed(f"{', '.join(lost)} was lost while receiving.", "start it again.", lost)
            return sending.result()
        except PublicationFailed as error:
            if error.culprits:
                raise
            raise PublicationFailed(error.what, error.fix, await attempt.suspects()) from error
        finally:
            for task in (sending, *losses):
                task.cancel()

    async def _verify(self, attempt: Attempt, sent: trainer_pb2.TransferSendResponse) -> None:
        request = rollout_pb2.VerifyReceiveRequest(publication=attempt.ref, checksums=sent.checksums)
        await attempt.ask_rest(RolloutRpc.VerifyPublication, request, attempt.left_s)

    async def _commit(self, job: JobRecord, attempt: Attempt) -> list[weights_pb2.MemberReport]:
        """Whoever verified in time may commit, however long others took."""
        request = rollout_pb2.CommitReceiveRequest(publication=attempt.ref)
        limit_s = max(attempt.left_s, min(job.spec.deadlines.publication_s, COMMIT_S))
        answers = await attempt.ask_rest(RolloutRpc.CommitPublication, request, limit_s)
        for member in attempt.receivers:
            if member.id in answers and not member.gone.is_set():
                await self._fleet.hold(member, Weights(job.id, job.lineage, job.version))
        return [answer.report for answer in answers.values()]

    # The end.

    async def _failed(
        self, job: JobRecord, attempt: Attempt, error: PublicationFailed, culprits: Sequence[Member]
    ) -> None:
        """Everybody forgets the attempt; the culprits are cut out."""
        message = f"publication of version {job.version} failed in {attempt.phase}: {error}"
        await self._events.add(job.id, attempt.failure(attempt.phase, error.culprits), message)
        self._prometheus.published(job.id, attempt.sender.source, "failed", attempt.phases, 0, [])
        if attempt.sender.source == "trainer":
            await attempt.finish(error.what)
        else:
            await attempt.briefly(attempt.finish(error.what))
        await attempt.abort(attempt.receivers, error.what)
        for member in culprits:
            await self._fleet.cut(member, f"it failed in {attempt.phase} of version {job.version}")

    async def _done(
        self, job: JobRecord, attempt: Attempt, reports: list[weights_pb2.MemberReport], seconds: float, failures: int
    ) -> Report:
        for member in [m for m in attempt.receivers if m.id in attempt.cut]:
            phase, why = attempt.cut[member.id]
            message = f"{member.id} failed in the publication of version {job.version}: {why}"
            await self._events.add(job.id, attempt.failure(phase, [member.id]), message)
            await attempt.abort([member], why)
            await self._fleet.cut(member, why)
        await attempt.finish("; ".join(f"{member} failed in {why}" for member, (_, why) in attempt.cut.items()))
        source = attempt.sender.source
        report = Report.of(attempt.ref, source, reports, attempt.phases, seconds, failures)
        await self._store.records(job.id).add_publication(report.to_json())
        self._prometheus.published(job.id, source, "done", attempt.phases, report.bytes, report.pauses)
        await self._events.add(job.id, events.PublicationDone.model_validate(report.to_json()), str(report))
        return report


def _ranks(members: Sequence[Member], first: int) -> dict[str, weights_pb2.Receiver]:
    """Each receiver's ranks in the communicator, from `first` on, after the trainer's."""
    receivers: dict[str, weights_pb2.Receiver] = {}
    for member in members:
        world_size = member.configured.world_size if member.configured else member.world_size
        receivers[member.id] = weights_pb2.Receiver(member_id=member.id, first_rank=first, world_size=world_size)
        first += world_size
    return receivers


def _dtype(receivers: Sequence[Member]) -> str:
    """Raises PublicationFailed where engines hold different dtypes: the odd ones out are the culprits."""
    by_dtype: dict[str, list[str]] = {}
    for member in receivers:
        by_dtype.setdefault(member.configured.dtype if member.configured else "", []).append(member.id)
    dtype, *others = sorted(by_dtype, key=lambda name: -len(by_dtype[name]))
    if others:
        culprits = tuple(member for other in others for member in by_dtype[other])
        what = f"the replicas' engines hold different dtypes: {by_dtype}."
        raise PublicationFailed(what, "start every replica with the job's rollout.dtype.", culprits)
    return dtype
