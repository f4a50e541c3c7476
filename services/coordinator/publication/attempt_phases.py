"""The four phases of one attempt: PREPARE, TRANSFER, VERIFY, COMMIT.

A receiver that knows the plan and is in the communicator already is asked for PREPARE and TRANSFER in one call. VERIFY
and COMMIT are one call always: what a receiver may serve depends on its own checksums only. A receiver that answers for
one phase only is asked for the other by itself: it would have to pause generation, or is of an earlier release.
"""

import asyncio
from collections.abc import Mapping, Sequence

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2, trainer_pb2, weights_pb2
from millrace.errors import InvalidJob, PublicationFailed
from millrace.weights.plans.manifest import Content
from millrace.wire.deadlines import COMMIT_S
from services.coordinator.publication.attempt import Attempt
from services.coordinator.publication.transfer_setup import MODES, MemberLayouts
from services.coordinator.state.job import JobRecord
from services.coordinator.state.member import Member, Weights


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
