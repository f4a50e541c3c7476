"""Routes to read of a job: series and distributions of its metrics, samples, its spec. And the check of a spec."""

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as InPath
from pydantic import ValidationError

from millrace.admission import submission
from millrace.admission.advice import advice
from millrace.errors import InvalidJob, NotFound
from millrace.events import PublicationDone
from millrace.rest import GroupPage, HistogramView, MetricView, SeriesView, SpecView, TokensView, ValidationView
from millrace.spec import JobSpec
from millrace.telemetry.metrics.histograms import STEPS_KEPT
from services.coordinator.observe import groups, histograms, series, tokens
from services.coordinator.observe.images import ImageFiles
from services.coordinator.rest import bodies
from services.coordinator.rest.bodies import LARGEST_STEP, Id
from services.coordinator.rest.schema import BODY_ERRORS, SPEC_BODY, Guards, Responses, error_responses, subject
from services.coordinator.store import Store

MOST_KEYS = 100
MOST_POINTS = 5000
MOST_HISTOGRAMS = 500
HISTOGRAMS = f"""How rewards, lengths, staleness, importance ratios and advantages were distributed in the steps of a
job. The last {STEPS_KEPT:,} steps have histograms."""


def add_series(router: APIRouter, store: Store) -> None:
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
        """Curves of step metrics with a limited number of points. If a point stands for several steps it has their
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


Text = Annotated[str, Query(max_length=200)]
BINARY = {"type": "string", "format": "binary"}
RECORD = r"^\d{1,19}-\d{1,19}$"
PROMPT = r"^e?\d{1,15}-\d{1,15}$"
MOST_NUMBER = 10_000
IMAGE: Responses = {
    200: {
        "description": "The file.",
        "content": {f"image/{kind}": {"schema": BINARY} for kind in ("png", "jpeg", "webp", "gif")},
    },
    **error_responses({404: "There is no such image, or its data is not there any more."}),
}
ONLY_SHOWN = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}
"""A browser takes the file for nothing but an image, also where it is opened by itself."""
KEPT = {"Cache-Control": "private, max-age=3600, immutable", "Vary": "Authorization"}
"""The hash in the address says what the answer is. Caches that several people share keep nothing."""


def add_samples(router: APIRouter, store: Store) -> None:
    """Adds the routes to those of jobs."""

    @router.get("/{job_id}/groups")
    async def pages(
        job_id: Id,
        limit: Annotated[int, Query(ge=1, le=200, description="Most groups of this page.")] = 50,
        cursor: Annotated[int | None, Query(ge=0, le=2**53, description="`next` of the page before.")] = None,
        step: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="Only groups of this step.")] = None,
        purpose: Annotated[str, Query(pattern="^(train|evaluation)?$")] = "",
        member: Text = "",
        data_source: Text = "",
        text: Annotated[str, Query(max_length=200, description="Part of a prompt or of an answer.")] = "",
        least: Annotated[float | None, Query(description="Least reward of at least one sample.")] = None,
        greatest: Annotated[float | None, Query(description="Greatest reward of at least one sample.")] = None,
    ) -> GroupPage:
        """The groups whose samples are kept, the newest first: all answers to one prompt together."""
        job = await store.jobs.get(job_id)
        wanted = groups.Wanted(step, purpose, member, data_source, text, least, greatest)
        return await groups.page(store.records(job.id), wanted, limit, cursor)

    @router.get("/{job_id}/tokens/{record}")
    async def tokens_of_a_group(
        job_id: Id, record: Annotated[str, InPath(pattern=RECORD, description="`record` of a sample.")]
    ) -> list[TokensView]:
        """The tokens of each trajectory of a group, with their texts, log-probabilities and weight versions. The newest
        groups have records of tokens, for three days."""
        job = await store.jobs.get(job_id)
        found = await store.records(job.id).tokens(record)
        if found is None:
            raise NotFound(f"there is no record {record} of tokens any more.", "look at a newer group.")
        model = json.loads(job.spec_json)["model"]["path"]
        return await asyncio.to_thread(tokens.views, found, model)

    files = ImageFiles()

    @router.get("/{job_id}/prompts/{prompt_id}/images/{number}", response_class=Response, responses=IMAGE)
    async def image_of_a_prompt(
        job_id: Id,
        prompt_id: Annotated[str, InPath(pattern=PROMPT, description="`prompt_id` of a sample.")],
        number: Annotated[int, InPath(ge=1, le=MOST_NUMBER, description="Place in `images` of the sample, from 1.")],
        sha256: Annotated[
            str, Query(pattern=r"^([0-9a-f]{64})?$", description="Hash that the file has to have: the sample's.")
        ] = "",
    ) -> Response:
        """The file of one image of a prompt: PNG, JPEG, WebP or GIF. It is read from the job's data, so it is there as
        long as that is; with `sha256` the answer is the image that the model was shown, or none."""
        job = await store.jobs.get(job_id)
        file, kind = await files.get(job, prompt_id, number, sha256)
        name = f"{job_id}-{prompt_id}-{number}.{kind.rpartition('/')[2]}"
        kept = KEPT if sha256 else {"Cache-Control": "no-store"}
        named = {"Content-Disposition": f'inline; filename="{name}"'}
        return Response(file, media_type=kind, headers={**ONLY_SHOWN, **kept, **named})


def routes(guards: Guards) -> APIRouter:
    router = subject("/v1/spec", "spec", guards)

    @router.get("/schema")
    async def schema() -> dict[str, Any]:
        """The JSON schema of a job spec, with the description, the bounds and the default of each field."""
        return JobSpec.model_json_schema()

    @router.post("/validate", openapi_extra=SPEC_BODY, responses=BODY_ERRORS)
    async def validate(request: Request) -> ValidationView:
        """Checks a job spec as a submission does, without submitting it, and lists every mistake with its fix."""
        tree = await bodies.tree(request)
        try:
            spec = await asyncio.to_thread(submission.check, tree)
        except InvalidJob as error:
            return ValidationView(
                valid=False, spec=None, mistakes=list(error.mistakes), detail=error.what, fix=error.fix
            )
        return ValidationView(valid=True, spec=_view(spec), mistakes=[], detail="", fix="", advice=advice(spec))

    return router


def add_spec(router: APIRouter, store: Store) -> None:
    """Adds the route of one job's spec to those of jobs."""

    @router.get("/{job_id}/spec")
    async def spec(job_id: Id) -> SpecView:
        """The job's spec, and the part of it that differs from the defaults of this release: all of it if another
        release took the job, and this one does not know the spec."""
        return stored_view(json.loads((await store.jobs.get(job_id)).spec_json))


def stored_view(tree: dict[str, Any]) -> SpecView:
    try:
        known = JobSpec.model_validate(tree)
    except ValidationError:
        return SpecView(spec=tree, given=tree)
    return SpecView(spec=tree, given=_given(tree, known.model_dump(exclude_defaults=True)))


def _view(spec: JobSpec) -> SpecView:
    tree = spec.model_dump(mode="json")
    return SpecView(spec=tree, given=_given(tree, spec.model_dump(exclude_defaults=True)))


def _given(tree: Any, named: Any) -> Any:
    """The part of `tree` that has the fields of `named`."""
    if isinstance(tree, dict) and isinstance(named, dict):
        return {key: _given(tree[key], value) for key, value in named.items() if key in tree}
    return tree
