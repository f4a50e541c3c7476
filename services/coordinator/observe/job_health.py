"""What shows that an active job stands still or goes wrong: the gauges that the alerts of deploy/prometheus look at."""

import asyncio
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from millrace.rest import StepMetrics
from millrace.telemetry.metrics.prometheus import coordinator as names
from millrace.telemetry.metrics.prometheus.declaration import PrometheusMetric
from millrace.telemetry.metrics.step.mismatch import K3_KL, K3_KL_SAME_VERSION
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store

DISK_S = 2.0
"""How long a file system may take to tell its free space. One that does not answer holds up no page."""
GAUGES = (
    *(names.JOB_STEP_TIME, names.JOB_CHECKPOINT_TIME, names.JOB_NOT_FINITE, names.JOB_MISMATCH_KL),
    *(names.DISK_FREE, names.DISK_SIZE),
)


class JobHealth:
    """Sets the gauges of active jobs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._asking: dict[str, asyncio.Future[tuple[int, int]]] = {}
        """Questions to file systems that have not been answered, by folder."""

    async def set(self, store: Store, active: Sequence[JobRecord]) -> None:
        """Sets every gauge to what holds now for the jobs `active`. Raises StoreDown."""
        shown = [(job, *await _rows(store, job), await self._disk(job.folder)) for job in active]
        for gauge in GAUGES:
            gauge.on(self._registry).clear()
        for job, last, saved, disk in shown:
            started_s = job.since_s or job.created_s
            self._put(names.JOB_STEP_TIME, job, max(started_s, last.time_s) if last else started_s)
            self._put(names.JOB_CHECKPOINT_TIME, job, max(started_s, saved.time_s) if saved else started_s)
            values = last.values if last else {}
            self._put(names.JOB_NOT_FINITE, job, sum(not math.isfinite(value) for value in values.values()))
            if (mismatch := values.get(K3_KL_SAME_VERSION, values.get(K3_KL))) is not None:
                self._put(names.JOB_MISMATCH_KL, job, mismatch)
            if disk is not None:
                self._put(names.DISK_FREE, job, disk[0])
                self._put(names.DISK_SIZE, job, disk[1])

    def _put(self, gauge: PrometheusMetric[Gauge], job: JobRecord, value: float) -> None:
        gauge.on(self._registry).labels(job_id=job.id).set(value)

    async def _disk(self, folder: str) -> tuple[int, int] | None:
        """Free bytes and size of the file system of `folder`; None where it does not tell."""
        if not folder:
            return None
        if folder not in self._asking:
            self._asking[folder] = asyncio.ensure_future(asyncio.to_thread(_free_and_size, Path(folder)))
        asking = self._asking[folder]
        await asyncio.wait([asking], timeout=DISK_S)
        if not asking.done():
            return None
        del self._asking[folder]
        return None if asking.exception() is not None else asking.result()


async def _rows(store: Store, job: JobRecord) -> tuple[StepMetrics | None, StepMetrics | None]:
    """The rows of the job's last step and of the step of its newest checkpoint; None where there is none."""
    records = store.records(job.id)
    last = await records.rows(job.step - 1, job.step) if job.step > 0 else []
    saved = await records.rows(job.checkpoint_step - 1, job.checkpoint_step) if job.checkpoint_step > 0 else []
    return next(iter(last), None), next(iter(saved), None)


def _free_and_size(folder: Path) -> tuple[int, int]:
    """The folder need not exist yet: its nearest parent counts. Raises OSError."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return usage.free, usage.total
