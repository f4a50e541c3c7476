"""The page for Prometheus: which jobs it has."""

import time

import pytest

from millrace.ids import Epoch
from millrace.rest import FleetView, JobState
from services.coordinator.observe import prometheus
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.store import Store
from tests.services.coordinator.redis import a_job, with_store

NOBODY = FleetView(epoch=Epoch(0), trainers=[], replicas=[])


def test_the_page_has_active_jobs_and_those_that_ended_lately(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store) -> None:
        metrics, ids = PrometheusMetrics(), [a_job(n).id for n in range(1, 31)]

        async def page() -> str:
            return (await metrics.page(store, NOBODY)).decode()

        for number, job_id in enumerate(ids, 1):
            await store.jobs.create(a_job(number))
            metrics.leased(job_id, 1)
            metrics.published(job_id, "trainer", "done", {"prepare": 0.1}, 1, [0.1])
        await store.jobs.move(ids[0], JobState.STARTING, "because")
        for job_id in ids[1:28]:
            await store.jobs.move(job_id, JobState.CANCELLED, "because", finished_s=time.time())
        text = await page()
        assert f'millrace_job_step{{job_id="{ids[0]}"}} 0.0' in text
        assert 'millrace_jobs{state="cancelled"} 27.0' in text and 'millrace_jobs{state="queued"} 2.0' in text
        named = {job_id for job_id in ids if job_id in text}
        assert named == {ids[0], *ids[28 - prometheus.LATELY : 28]}
        monkeypatch.setattr(prometheus, "LATELY_S", -1.0)
        text = await page()
        assert {job_id for job_id in ids if job_id in text} == {ids[0]}
        assert text.count("millrace_leases_total{") == text.count("millrace_publications_total{") == 1

    with_store(redis_url, scenario)
