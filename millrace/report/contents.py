"""What a report is made of, asked of the coordinator."""

import time
from dataclasses import dataclass

from millrace.client import Client
from millrace.events import Event
from millrace.rest import FleetView, JobView, LedgerView, SampleView, StepMetrics


@dataclass(frozen=True)
class Contents:
    """A job as it was at one time."""

    time_s: float
    """Unix time."""
    job: JobView
    ledger: LedgerView
    metrics: list[StepMetrics]
    """One row a step, in their order; step 0 has the evaluation before training."""
    events: list[Event]
    samples: list[SampleView]
    """The newest first."""
    fleet: FleetView


def gather(client: Client, job_id: str, samples: int) -> Contents:
    """Asks for the job with at most `samples` of its newest samples. Raises NotFound, Unavailable."""
    return Contents(
        time_s=time.time(),
        job=client.job(job_id),
        ledger=client.ledger(job_id),
        metrics=client.metrics(job_id, after_step=-1),
        events=list(client.events(job_id, follow=False)),
        samples=client.samples(job_id, limit=samples) if samples else [],
        fleet=client.fleet(),
    )
