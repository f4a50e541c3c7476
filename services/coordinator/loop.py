"""The job loop: how a job goes from its first version to its report.

Every stage looks at what the store holds and does only what is missing, so the loop may be broken off at any point and
begun again from the top: after a crash of the coordinator, of Redis or of the trainer.
"""

from services.coordinator.run import Run
from services.coordinator.stages.admit import admit
from services.coordinator.stages.checkpoint import checkpoint
from services.coordinator.stages.configure import configure
from services.coordinator.stages.evaluate import evaluate
from services.coordinator.stages.issue import issue
from services.coordinator.stages.publish import publish
from services.coordinator.stages.step import interrupted, step
from services.coordinator.stages.track import track


async def train(run: Run) -> None:
    """Carries out a job. Raises Cancelled, TrainerLost, StoreDown, and MillraceError where the job has failed."""
    # Going back may have been broken off, and begins where a job that had ended is taken up again.
    if await run.prompts.undo():
        await run.evaluation.forget()
        await run.parts.fleet.grow()

    # The trainer loads the model, or says what it holds; ledger and trainer agree on the version after this.
    await configure(run)
    if batch := await interrupted(run):
        await step(run, batch)

    while True:
        # What belongs to the version that the trainer holds now.
        await publish(run)
        await run.heed()  # after the publication: who waits through a pause waits with the current weights
        if not run.done:
            await issue(run)
        await checkpoint(run)
        await evaluate(run)
        await track(run)
        if run.done:
            break

        # The next version.
        batch = await admit(run)
        await step(run, batch)
