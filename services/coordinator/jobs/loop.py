"""The job loop: how a job goes from its first version to its report.

Every stage reads what the store holds and does only what is missing. So the loop may be interrupted at any point and
started again from the top: after a crash of the coordinator, of Redis or of the trainer.
"""

from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.stages.admit import admit
from services.coordinator.stages.checkpoint import checkpoint, give_way, keep_best
from services.coordinator.stages.configure import configure
from services.coordinator.stages.evaluate import begin_evaluation, evaluate, evaluated_before, recall_evaluation
from services.coordinator.stages.issue import issue
from services.coordinator.stages.publish import publish
from services.coordinator.stages.run import Run
from services.coordinator.stages.standby import copy_to_standbys
from services.coordinator.stages.step import interrupted, step
from services.coordinator.stages.stop import stop_early
from services.coordinator.stages.track import track


async def train(run: Run) -> None:
    """Runs a job to its end. Raises Cancelled, GaveWay, TrainerLost, StoreDown, and MillraceError if the job fails."""
    # A rewind may have been interrupted; and a resumed job begins with one.
    if await run.prompts.undo():
        await run.forget_evaluation()
        await run.components.fleet.grow()

    await recall_evaluation(run)

    # The trainer loads the model, or says what it holds. After this, ledger and trainer agree on the version.
    await configure(run)
    if batch := await interrupted(run):
        await step(run, batch)

    while True:
        # Replicas hold the version before until all of its held-out answers are there.
        await evaluated_before(run, SpanKind.PUBLISH)

        # For the version that the trainer holds now.
        await publish(run)
        await run.heed()  # after the publication, so that replicas hold the current weights while the job is paused
        await begin_evaluation(run)  # ahead of what is trained next, which goes on beside it
        if not run.done:
            await issue(run)
        await checkpoint(run)
        await copy_to_standbys(run)
        await evaluate(run)
        await track(run)
        await keep_best(run)
        if run.done:
            break
        await stop_early(run)
        if run.done:
            continue  # the last checkpoint and evaluation
        await give_way(run)

        # From here to the next version.
        batch = await admit(run)
        await evaluated_before(run, SpanKind.TRAIN)
        await step(run, batch)
