"""Publishes the trainer's version to every replica that is ready for it."""

from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.observe.step_metrics import step_seconds
from services.coordinator.publication.report import PublicationReport
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import traced

PARTS = ("gen", "train", "update_weights", "step")


@traced(SpanKind.PUBLISH)
async def publish(run: Run) -> None:
    """Publishes the current version. Replicas that join later get it when they join.

    Raises TrainerLost, PublicationFailed.
    """
    async with run.components.trainer.turn:
        lacking = [m for m in run.components.fleet.ready_for(run.job.id) if m.due and not m.holds(run.weights)]
        report = await run.components.publisher.publish(run.job, lacking)
    run.components.fleet.bell.ring()
    await _record(run, report)


async def _record(run: Run, report: PublicationReport) -> None:
    """Adds the publication's metrics to the step's row, which is complete with them."""
    values = await run.records.row(run.job.step)
    if values is None or "timing_s/update_weights" in values:
        return
    added = report.metrics()
    replicas = [m for m in run.components.fleet.replicas if m.weights is not None]
    devices = run.components.trainer.member.world_size + sum(m.world_size for m in replicas)
    added |= step_seconds(values | added, devices)
    await run.add_to_row(added)
    values |= added
    run.components.prometheus.stepped(run.job.id, {part: values.get(f"timing_s/{part}", 0.0) for part in PARTS})
