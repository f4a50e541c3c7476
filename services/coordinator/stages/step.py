"""One training step on one batch, and its entry in the ledger."""

import time

from millrace import events
from millrace.errors import MillraceError
from millrace.wire.methods import TrainerRpc
from millrace.wire.v1 import trainer_pb2
from services.coordinator.observe.samples import samples_in
from services.coordinator.observe.step_metrics import batch_metrics, mean, milliseconds_per_token, step_row
from services.coordinator.stages.admit import Batch
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import traced
from services.coordinator.stages.warn import warn


async def interrupted(run: Run) -> Batch | None:
    """The batch of a step that was sent to the trainer and not marked as trained; None where there is none."""
    saved = await run.records.batch()
    if saved is None or saved[0] != run.job.step + 1:
        return None
    return Batch(*saved)


@traced
async def step(run: Run, batch: Batch) -> None:
    """Sends the trainer references to the groups and their lengths, then marks the batch as trained: metrics, samples
    and ledger at once."""
    await run.records.set_batch(batch.step, batch.groups, batch.waited_s)
    trainer, started = run.components.trainer, time.monotonic()
    async with trainer.turn:
        trainer.holds = None
        answer = await trainer.call(TrainerRpc.Step, _request(run, batch))
        if answer.version != batch.step:
            what = f"{trainer.member.id} answered step {batch.step} with version {answer.version}."
            raise MillraceError(what, "run the same release of millrace everywhere.")
        await _mark(run, batch, answer, time.monotonic() - started)
        await run.refresh()
        trainer.holds = (run.job.id, run.job.version)


def _request(run: Run, batch: Batch) -> trainer_pb2.StepRequest:
    groups = [
        trainer_pb2.GroupRef(prompt_id=g.prompt_id, prompt_tokens=g.prompt_tokens, response_tokens=g.response_tokens)
        for g in batch.groups
    ]
    return trainer_pb2.StepRequest(
        job_id=run.job.id, step=batch.step, groups=groups, work_address=run.components.work_address
    )


async def _mark(run: Run, batch: Batch, answer: trainer_pb2.StepResponse, seconds: float) -> None:
    reward = mean([r for g in batch.groups for r in g.rewards])
    values = batch_metrics(batch.groups, run.job.version, run.spec)
    values |= {"timing_s/gen": batch.waited_s, "timing_s/train": seconds}
    values |= milliseconds_per_token({**answer.metrics, **values}, batch.groups)
    row = step_row(batch.step, values, trainer=answer.metrics)
    prompts = [g.prompt_id for g in batch.groups]
    samples = await _samples(run, batch)
    if not await run.prompts.train(prompts, batch.step, reward, row.model_dump_json(), samples):
        return
    staleness = [run.job.version - oldest for g in batch.groups for oldest in g.oldest]
    run.components.prometheus.trained(run.job.id, staleness)
    message = f"step {batch.step} of {run.steps}: reward {reward:.4g}"
    await run.tell(events.StepDone(step=batch.step, reward=reward, seconds=seconds), message)
    await warn(run, row)


async def _samples(run: Run, batch: Batch) -> list[str]:
    wanted = [g.prompt_id for g in batch.groups[: run.spec.tracking.samples_per_step]]
    return [sample.model_dump_json() for sample in await samples_in(run.prompts, wanted, batch.step)]
