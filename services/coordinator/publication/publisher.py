"""Publications of a job's weights: from the trainer to its replicas, or from a replica to siblings that join.

A receiver that fails before the weights have arrived is taken out of the fleet, and the others are tried again; one
that fails later is taken out alone. It joins again with a publication, or a copy, for itself.

The phases of an attempt are PREPARE, TRANSFER, VERIFY and COMMIT. A receiver that knows the plan and is in the
communicator already is asked for PREPARE and TRANSFER in one call. VERIFY and COMMIT are one call always: what a
receiver may serve depends on its own checksums only. A receiver that answers for one phase only is asked for the other
by itself: it would have to pause generation, or is of an earlier release.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from millrace import events
from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, trainer_pb2, weights_pb2
from millrace.errors import InvalidJob, PublicationFailed
from millrace.ids import JobId, MemberId
from millrace.spec.pool import ROLLOUT
from millrace.weights.plans.manifest import Content
from millrace.wire.deadlines import COMMIT_S
from services.coordinator.fleet.partition import Partition, Trainer, TrainerLost
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.publication.attempt import Attempt, BackgroundCalls, Sender, SiblingSender, TrainerSender
from services.coordinator.publication.report import PublicationReport
from services.coordinator.publication.transfer_setup import MODES, MemberLayouts
from services.coordinator.state.job import JobRecord
from services.coordinator.state.member import Member, Unconfigured, Weights
from services.coordinator.store import Store

Layouts = Mapping[Content, MemberLayouts]
PLACED = "placed"
"""Names the note with the digest of the spec whose weights a replica has taken."""
BLAMELESS_FAILURES = 3
"""Attempts that may fail without a receiver as the culprit, before the publication fails for good."""


class Publisher:
    """Runs one publication from the trainer, or one copy between replicas, at a time."""

    def __init__(
        self, store: Store, fleet: Partition, trainer: Trainer, events: Events, prometheus: PrometheusMetrics
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._trainer = trainer
        self._events = events
        self._prometheus = prometheus
        self._layouts = _no_layouts()
        self.publishing = False
        """Whether the trainer is sending."""
        self._copying: asyncio.Task[PublicationReport] | None = None
        self._getting_base: set[MemberId] = set()
        """Receivers of the copy in progress, if it is one of a base."""
        self._background = BackgroundCalls()
        self._placed: tuple[JobId, str] | None = None
        """Job and digest of its spec for which PLACED was noted last."""

    @property
    def sending(self) -> bool:
        """Whether weights are on their way, from the trainer or from a replica."""
        return self.publishing or self._copying is not None

    async def publish(self, job: JobRecord, receivers: Sequence[Member]) -> PublicationReport:
        """Brings the trainer's version to `receivers`; those that fail are taken out. Needs the trainer's turn.

        A copy in progress is ended first: its receivers are served here, or join again. One of a base goes on. Raises
        TrainerLost, and PublicationFailed if it fails and no replica is to blame.
        """
        if not receivers:
            return PublicationReport.without_receivers(job.version)
        self.publishing = True
        try:
            return await self._send(job, await self._not_copied_to(receivers))
        finally:
            self.publishing = False

    async def _not_copied_to(self, receivers: Sequence[Member]) -> Sequence[Member]:
        """Ends a copy that is in progress, except one of a base, which no publication changes: the other receivers are
        left then, and those of the copy get the version when they have the base."""
        if self._copying is None:
            return receivers
        if self._getting_base and (others := [m for m in receivers if m.id not in self._getting_base]):
            return others
        self._copying.cancel()
        await asyncio.wait([self._copying])
        return receivers

    async def copy(self, job: JobRecord, sibling: Member, receivers: Sequence[Member]) -> PublicationReport | None:
        """Brings `receivers` the version that `sibling` serves; the trainer has no part in it. Those that lack the base
        of an adapter get the base only: another copy brings them the adapter of the version that is current then. None
        if a publication ended it or is in progress. Raises PublicationFailed if it fails and no receiver is to
        blame, SiblingCannotSend if the sibling cannot send these weights."""
        if self.publishing or self._copying is not None:
            return None
        content = Content.ADAPTER if job.spec.model.publishes_adapter else Content.MODEL
        if content is Content.ADAPTER and (lacking := [m for m in receivers if not _has_base(m)]):
            content, receivers = Content.BASE, lacking
            self._getting_base = {m.id for m in lacking}
        sender = SiblingSender(sibling, self._fleet)
        copying = self._copying = asyncio.create_task(self._run(job, content, receivers, sender, _no_layouts(), 1))
        try:
            await asyncio.wait([copying])
            return None if copying.cancelled() else copying.result()
        finally:
            copying.cancel()
            self._copying, self._getting_base = None, set()

    async def _send(self, job: JobRecord, receivers: Sequence[Member]) -> PublicationReport:
        """Brings the trainer's version to `receivers`: the model; or the adapter, to receivers without its base after
        the base. Those that have the base do not wait for the others. The report is that of the model, or of the
        adapter of those who got it first, with the seconds of all."""
        sender, layouts, tries = TrainerSender(self._trainer), self._layouts, BLAMELESS_FAILURES
        if not job.spec.model.publishes_adapter:
            return await self._run(job, Content.MODEL, receivers, sender, layouts, tries)
        started = time.monotonic()
        having, lacking = [m for m in receivers if _has_base(m)], [m for m in receivers if not _has_base(m)]
        reports = []
        if having:
            reports.append(await self._run(job, Content.ADAPTER, having, sender, layouts, tries))
        if lacking:
            await self._run(job, Content.BASE, lacking, sender, layouts, tries)
            reports.append(await self._run(job, Content.ADAPTER, lacking, sender, layouts, tries))
        return reports[0].lasting(time.monotonic() - started)

    async def _run(
        self,
        job: JobRecord,
        content: Content,
        receivers: Sequence[Member],
        sender: Sender,
        layouts: Layouts,
        tries: int,
    ) -> PublicationReport:
        """Attempts until one succeeds, or no receiver is left. The last of `tries` failures without a culprit is
        raised."""
        started, failures, blameless = time.monotonic(), 0, 0
        while left := [m for m in receivers if _can_receive(m, job, content)]:
            attempt = await self._new_attempt(job, content, left, sender)
            try:
                reports = await run_phases(job, attempt, layouts[content])
            except TrainerLost as error:
                await attempt.abort(left, error.what)
                raise
            except PublicationFailed as error:
                culprits = attempt.culprits(error)
                layouts[content].forget()
                await self._attempt_failed(job, attempt, error, culprits)
                failures += 1
                blameless += not culprits
                if blameless == tries:
                    raise
                receivers = [m for m in left if m not in culprits]
            except asyncio.CancelledError:
                if sender.is_copy:  # a publication ended the copy: its sender and its receivers have to know
                    reason = "a publication came first"
                    self._background.start(attempt.finish(reason), attempt.abort(attempt.receivers, reason))
                raise
            else:
                layouts[content].path_choice.learn(attempt.phase_seconds["transfer"], whole=attempt.whole)
                return await self._succeeded(job, attempt, reports, time.monotonic() - started, failures)
        return PublicationReport.without_receivers(job.version)

    async def _new_attempt(self, job: JobRecord, content: Content, receivers: list[Member], sender: Sender) -> Attempt:
        number = await self._store.jobs.next_attempt(job.id)
        ref = weights_pb2.PublicationRef(job_id=job.id, version=job.version, epoch=self._fleet.epoch, attempt=number)
        deadline = asyncio.get_running_loop().time() + job.spec.deadlines.publication_s
        return Attempt(ref, content, receivers, deadline, self._fleet, sender, self._background)

    async def _attempt_failed(
        self, job: JobRecord, attempt: Attempt, error: PublicationFailed, culprits: Sequence[Member]
    ) -> None:
        """All members forget the attempt; the culprits are taken out of the fleet."""
        message = f"publication of version {job.version} failed in {attempt.phase}: {error}"
        await self._events.add(job.id, attempt.failure(attempt.phase, error.culprits), message)
        self._prometheus.published(job.id, attempt.sender.source, "failed", attempt.phase_seconds, 0, [])
        if attempt.sender.is_copy:
            await self._background.wait_briefly(attempt.finish(error.what))
        else:
            await attempt.finish(error.what)
        await attempt.abort(attempt.receivers, error.what)
        for member in culprits:
            await self._take_out(job, attempt, member, f"it failed in {attempt.phase} of version {job.version}")

    async def _succeeded(
        self, job: JobRecord, attempt: Attempt, reports: list[weights_pb2.MemberReport], seconds: float, failures: int
    ) -> PublicationReport:
        """Takes out the receivers that failed after the transfer, ends the attempt and reports it."""
        for member in [m for m in attempt.receivers if m.id in attempt.cut]:
            phase, why = attempt.cut[member.id]
            message = f"{member.id} failed in the publication of version {job.version}: {why}"
            await self._events.add(job.id, attempt.failure(phase, [member.id]), message)
            await attempt.abort([member], why)
            await self._take_out(job, attempt, member, why)
        if len(attempt.cut) < len(attempt.receivers):
            await self._note_placed(job)
        await attempt.finish("; ".join(f"{member} failed in {why}" for member, (_, why) in attempt.cut.items()))
        source = attempt.sender.source
        report = PublicationReport.of(
            attempt.ref, attempt.content, source, reports, attempt.phase_seconds, seconds, failures
        )
        await self._store.records(job.id).add_publication(report.to_json())
        self._prometheus.published(job.id, source, "done", attempt.phase_seconds, report.bytes, report.pauses)
        await self._events.add(job.id, report.done, str(report))
        return report

    async def _take_out(self, job: JobRecord, attempt: Attempt, member: Member, why: str) -> None:
        """Takes a receiver that failed out of service. One that refused the job has not to be asked again soon."""
        await self._fleet.cut(member, why)
        if (error := attempt.refusals.get(member.id)) is None:
            return
        never_placed = await self._store.records(job.id).note(PLACED) != job.spec_digest
        refusal = Unconfigured(job.id, job.spec_digest, error, refused=True, of_weights=never_placed)
        await self._fleet.refused(member, refusal)
        event = events.MemberFailed(member=member.id, refused=True, pool=ROLLOUT)
        await self._events.add(job.id, event, f"{member.id} refused the weights of {job.id}: {error}")

    async def _note_placed(self, job: JobRecord) -> None:
        """Notes once that a replica has taken the weights of the job with this spec."""
        if self._placed != (placed := (job.id, job.spec_digest)):
            await self._store.records(job.id).set_note(PLACED, job.spec_digest)
            self._placed = placed


def _no_layouts() -> Layouts:
    return {content: MemberLayouts() for content in Content}


def _has_base(member: Member) -> bool:
    return member.configured is not None and member.configured.has_base


def _can_receive(member: Member, job: JobRecord, content: Content) -> bool:
    """Whether the member still takes part: it may have failed and been configured again meanwhile."""
    return member.ready_for(job.id) and (content is not Content.ADAPTER or _has_base(member))


async def run_phases(job: JobRecord, attempt: Attempt, layouts: MemberLayouts) -> list[weights_pb2.MemberReport]:
    """The reports of the sender and of the receivers that serve the version now.

    Raises PublicationFailed with the culprits of PREPARE and TRANSFER. Receivers that fail later are cut in the
    attempt.
    """
    try:
        async with asyncio.timeout_at(attempt.deadline):
            waiting = await attempt.timed("prepare", _prepare(job, attempt, layouts))
            sent = await attempt.timed("transfer", _transfer(attempt, waiting))
    except TimeoutError as error:
        late, seconds = tuple(attempt.unanswered), job.spec.deadlines.publication_s
        if attempt.phase == "transfer" and set(late) <= {attempt.sender.id}:  # it waits for a receiver
            late = await attempt.suspects() or late
        what = f"{attempt.phase} was not over after {seconds:g} s: {', '.join(late)} did not answer."
        raise PublicationFailed(what, "look at their logs, or raise deadlines.publication_s.", late) from error
    verified = await attempt.timed("verify", _verify(job, attempt, sent))
    return [sent.report, *await attempt.timed("commit", _commit(job, attempt, verified))]


async def _prepare(job: JobRecord, attempt: Attempt, layouts: MemberLayouts) -> list[Member]:
    """Sender and receivers agree on the plan; answers the receivers that do not receive yet. A receiver that agreed to
    this plan last time gets its hash only, and the plan again if it does not know it any more."""
    setup = await layouts.setup(attempt, job.spec.publication)
    attempt.prepared = True
    prepared = await attempt.ask_sender(attempt.sender.methods.prepare, setup.prepare_send(attempt))
    ranks, mode = setup.ranks(attempt.receivers), MODES[job.spec.publication.commit]

    def request(member: Member, knows_plan: bool) -> rollout_pb2.PrepareReceiveRequest:
        deadline_s = attempt.left_s + COMMIT_S
        receiver = ranks[member.id]
        return setup.prepare_receive(
            attempt, prepared, receiver, knows_plan=knows_plan, deadline_s=deadline_s, mode=mode
        )

    knowing, method = layouts.agreed_plans, RolloutRpc.PreparePublication
    answers = await attempt.ask_all(method, lambda m: request(m, knowing.get(m.id) == prepared.plan_hash))
    forgotten = [m for m in attempt.receivers if not answers[m.id].plan_hash]
    answers |= await attempt.ask_all(method, lambda m: request(m, False), forgotten)
    layouts.agreed_plans = {member: answer.plan_hash for member, answer in answers.items()}
    if differing := tuple(i for i, answer in answers.items() if answer.plan_hash != prepared.plan_hash):
        what = f"{', '.join(differing)} worked out another plan than {attempt.sender.id}."
        raise PublicationFailed(what, "run the same release of millrace everywhere.", differing)
    attempt.whole = not prepared.HasField("base") or any(answer.lacks_base for answer in answers.values())
    return [m for m in attempt.receivers if not answers[m.id].begun]


async def _transfer(attempt: Attempt, waiting: Sequence[Member]) -> trainer_pb2.TransferSendResponse:
    """The receivers start to receive, then the sender sends until the last byte is sent or a receiver is lost."""
    receive = rollout_pb2.TransferReceiveRequest(publication=attempt.ref)
    await attempt.ask_all(RolloutRpc.TransferPublication, lambda _: receive, waiting)
    send = trainer_pb2.TransferSendRequest(publication=attempt.ref, whole=attempt.whole)
    sending = asyncio.create_task(attempt.ask_sender(attempt.sender.methods.transfer, send))
    loss = asyncio.create_task(_loss(attempt))
    try:
        await asyncio.wait({sending, loss}, return_when=asyncio.FIRST_COMPLETED)
        if lost := attempt.lost():
            raise PublicationFailed(f"{', '.join(lost)} was lost while receiving.", "start it again.", lost)
        return sending.result()
    except PublicationFailed as error:
        if error.culprits:
            raise
        raise PublicationFailed(error.what, error.fix, await attempt.suspects()) from error
    finally:
        for task in (sending, loss):
            task.cancel()


async def _loss(attempt: Attempt) -> None:
    """Returns as soon as a receiver is lost."""
    while not attempt.lost():
        await attempt.fleet.bell.next().wait()


async def _verify(
    job: JobRecord, attempt: Attempt, sent: trainer_pb2.TransferSendResponse
) -> dict[str, rollout_pb2.VerifyReceiveResponse]:
    """The answers of the receivers whose checksums are equal. They commit at once, however long others take."""
    request = rollout_pb2.VerifyReceiveRequest(publication=attempt.ref, checksums=sent.checksums, commit=True)
    limit_s = attempt.left_s + min(job.spec.deadlines.publication_s, COMMIT_S)
    answers = await attempt.ask_remaining(RolloutRpc.VerifyPublication, request, limit_s)
    for member, answer in answers.items():
        if answer.commit_failure:
            attempt.cut[member] = "commit", f"{RolloutRpc.CommitPublication.name}: {answer.commit_failure}"
            if answer.commit_refused:
                attempt.refusals[member] = InvalidJob(answer.commit_failure)
    return answers


async def _commit(
    job: JobRecord, attempt: Attempt, verified: Mapping[str, rollout_pb2.VerifyReceiveResponse]
) -> list[weights_pb2.MemberReport]:
    """The reports of the receivers that serve the version; those that have only verified it are asked to commit."""
    reports = {member: answer.report for member, answer in verified.items() if answer.HasField("report")}
    waiting = [m for m in attempt.receivers if m.id not in reports and m.id not in attempt.cut]
    if waiting:
        request = rollout_pb2.CommitReceiveRequest(publication=attempt.ref)
        limit_s = max(attempt.left_s, min(job.spec.deadlines.publication_s, COMMIT_S))
        answers = await attempt.ask_remaining(RolloutRpc.CommitPublication, request, limit_s, waiting)
        reports |= {member: answer.report for member, answer in answers.items()}
    serving = [member for member in attempt.receivers if member.id in reports and not member.gone.is_set()]
    if attempt.content is Content.BASE:
        await attempt.fleet.hold_base(*serving)
    else:
        await attempt.fleet.hold(Weights(job.id, job.lineage, job.version), *serving)
    return list(reports.values())
