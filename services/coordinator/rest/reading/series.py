"""/v1/jobs/{job_id}/series and what else of a job's metrics is drawn: curves, histograms, publications."""

from typing import Annotated

from fastapi import APIRouter, Query

from millrace.events import PublicationDone
from millrace.rest import HistogramView, MetricView, SeriesView
from millrace.telemetry.metrics.histograms import STEPS_KEPT
from services.coordinator.observe import histograms, series
from services.coordinator.rest.parameters import LARGEST_STEP, Id
from services.coordinator.store import Store

MOST_KEYS = 100
MOST_POINTS = 5000
MOST_HISTOGRAMS = 500
HISTOGRAMS = f"""How rewards, lengths, staleness, importance ratios and advantages were distributed in the steps of a
job. The last {STEPS_KEPT:,} steps have histograms."""


def add(router: APIRouter, store: Store) -> None:
    """Adds the routes to those of jobs."""

    @router.get("/{job_id}/metrics/keys")
    async def metric_keys(job_id: Id) -> list[MetricView]:
        """Every metric that a step of the job has, with its section, unit and meaning."""
        job = await store.jobs.get(job_id)
        return await series.metrics(store.records(job.id), job.step)

    @router.get("/{job_id}/series")
    async def curves(
        job_id: Id,
        keys: Annotated[list[str], Query(max_length=MOST_KEYS, description="Names of metrics; repeat it for each.")],
        points: Annotated[int, Query(ge=2, le=MOST_POINTS, description="Most points of a curve.")] = 500,
        first: Annotated[int, Query(ge=0, le=LARGEST_STEP, description="First step.")] = 0,
        last: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="Last step; the job's newest.")] = None,
    ) -> SeriesView:
        """Curves of step metrics with a limited number of points. Where a point stands for several steps it has their
        mean, least and greatest value."""
        job = await store.jobs.get(job_id)
        end = job.step if last is None else min(last, job.step)
        return await series.series(store.records(job.id), keys, first, end, job.step, points)

    @router.get("/{job_id}/histograms", description=HISTOGRAMS)
    async def distributions(
        job_id: Id,
        points: Annotated[int, Query(ge=1, le=MOST_HISTOGRAMS, description="Most steps, spread evenly.")] = 100,
        first: Annotated[int, Query(ge=0, le=LARGEST_STEP, description="First step.")] = 0,
        last: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="Last step; the job's newest.")] = None,
    ) -> list[HistogramView]:
        job = await store.jobs.get(job_id)
        end = job.step if last is None else min(last, job.step)
        return await histograms.views(store.records(job.id), first, end, job.step, points)

    @router.get("/{job_id}/publications")
    async def publications(
        job_id: Id, limit: Annotated[int, Query(ge=1, le=1000, description="Most publications.")] = 50
    ) -> list[PublicationDone]:
        """The newest publications of weights, the last one first, with phases and members."""
        job = await store.jobs.get(job_id)
        found = await store.records(job.id).publications()
        return [PublicationDone.model_validate(report) for report in reversed(found[-limit:])]
