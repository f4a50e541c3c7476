"""What Prometheus is told of active jobs that stand still, go wrong or fill their disk."""

import dataclasses
import math
import time
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from millrace.rest import StepMetrics
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.metrics.step.mismatch import K3_KL, K3_KL_SAME_VERSION
from services.coordinator.observe import prometheus as page
from services.coordinator.observe.prometheus import JobHealth
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from tests.services.coordinator.redis import a_job, with_store
from tests.telemetry.metrics.pages import value


async def told(store: Store, *active: JobRecord) -> str:
    registry = DeclaredRegistry(Owner.COORDINATOR)
    await JobHealth(registry).set(store, active)
    return generate_latest(registry).decode()


def test_the_last_step_and_the_newest_checkpoint_are_told(redis_url: str, tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        job = dataclasses.replace(a_job(), since_s=50.0, folder=str(tmp_path / "not" / "yet"))
        label = f'{{job_id="{job.id}"}}'
        page = await told(store, job)
        assert value(page, f"millrace_job_step_timestamp_seconds{label}") == 50.0
        assert value(page, f"millrace_job_checkpoint_timestamp_seconds{label}") == 50.0
        size = value(page, f"millrace_output_disk_size_bytes{label}")
        assert 0 <= value(page, f"millrace_output_disk_free_bytes{label}") <= size > 0
        records = store.records(job.id)
        await records.set_rows(StepMetrics(step=1, time_s=60.0, values={K3_KL: 0.5, "actor/loss": 1.0}))
        await records.set_rows(
            StepMetrics(step=2, time_s=70.0, values={K3_KL: 0.5, K3_KL_SAME_VERSION: 0.25, "actor/loss": math.nan})
        )
        page = await told(store, dataclasses.replace(job, step=1, checkpoint_step=1))
        assert value(page, f"millrace_job_mismatch_kl_nats{label}") == 0.5
        assert value(page, f"millrace_job_not_finite_metrics{label}") == 0
        page = await told(store, dataclasses.replace(job, step=2, checkpoint_step=1))
        assert value(page, f"millrace_job_step_timestamp_seconds{label}") == 70.0
        assert value(page, f"millrace_job_checkpoint_timestamp_seconds{label}") == 60.0
        assert value(page, f"millrace_job_mismatch_kl_nats{label}") == 0.25
        assert value(page, f"millrace_job_not_finite_metrics{label}") == 1
        resumed = dataclasses.replace(job, step=2, checkpoint_step=1, since_s=90.0)
        assert value(await told(store, resumed), f"millrace_job_step_timestamp_seconds{label}") == 90.0

    with_store(redis_url, scenario)


def test_a_file_system_that_does_not_answer_holds_up_no_page(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(folder: Path) -> tuple[int, int]:
        time.sleep(1.0)
        raise OSError("gone")

    monkeypatch.setattr(page, "DISK_S", 0.05)
    monkeypatch.setattr(page, "_free_and_size", hangs)

    async def scenario(store: Store) -> None:
        page = await told(store, dataclasses.replace(a_job(), folder="/out"))
        assert "millrace_job_step_timestamp_seconds{" in page and "millrace_output_disk_free_bytes{" not in page

    with_store(redis_url, scenario)
