"""What the demo says at its end."""

from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from millrace.client import Client
from millrace.rest import JobState, JobView, LedgerView, StepMetrics
from millrace.terminal.output import ledger_line, number, people

PAUSE = "publication/pause_s"


@dataclass(frozen=True)
class Outcome:
    job: JobView
    ledger: LedgerView
    rows: list[StepMetrics]
    margin: float

    @classmethod
    def of(cls, client: Client, job_id: str, margin: float) -> "Outcome":
        return cls(client.job(job_id), client.ledger(job_id), client.metrics(job_id), margin)

    @property
    def rise(self) -> float | None:
        before, after = self.job.evaluation_before, self.job.evaluation_last
        return None if before is None or after is None else after - before

    @property
    def learned(self) -> bool:
        """The job succeeded, its ledger adds up, and the held-out reward rose by the margin."""
        ledger = self.ledger
        adds_up = ledger.issued == (ledger.queued + ledger.leased + ledger.generated + ledger.trained + ledger.dropped)
        rose = self.rise is not None and self.rise >= self.margin
        return self.job.state is JobState.SUCCEEDED and adds_up and rose

    @property
    def mean_pause_s(self) -> float | None:
        """Seconds that generation stood still in a publication."""
        pauses = [row.values[PAUSE] for row in self.rows if PAUSE in row.values]
        return fmean(pauses) if pauses else None


def print_outcome(outcome: Outcome, seconds: dict[str, float], console: Console | None = None) -> None:
    job = outcome.job
    rows = Table.grid(padding=(0, 2))
    rows.add_row("job", f"{job.id} {job.state}" + (f": {job.failure}" if job.failure else ""))
    rows.add_row("held-out reward", f"{number(job.evaluation_before)} before, {number(job.evaluation_last)} after")
    rows.add_row("ledger", ledger_line(outcome.ledger))
    pause_s = outcome.mean_pause_s
    rows.add_row("mean pause", "–" if pause_s is None else f"{1000 * pause_s:.1f} ms a publication")
    rows.add_row("report", job.report or "–")
    rows.add_row("checkpoint", job.checkpoint or "–")
    rows.add_row("seconds", ", ".join(f"{part} {spent:.0f}" for part, spent in seconds.items()))
    console = console or people()
    console.print()
    console.print(rows)
    rise = number(outcome.rise)
    verdict = "learned" if outcome.learned else "NOT learned"
    console.print(f"[bold]{verdict}[/]: the held-out reward rose by {rise}, {outcome.margin:.2f} is asked for.")
