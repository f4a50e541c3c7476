"""/v1/spec: the schema of job specs, and whether a spec is valid."""

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request

from millrace.admission import submission
from millrace.admission.advice import advice
from millrace.errors import InvalidJob
from millrace.rest import SpecView, ValidationView
from millrace.spec import JobSpec
from services.coordinator.rest import bodies
from services.coordinator.rest.parameters import Id
from services.coordinator.rest.schema import BODY_ERRORS, SPEC_BODY
from services.coordinator.store import Store


def routes() -> APIRouter:
    router = APIRouter(prefix="/v1/spec", tags=["spec"])

    @router.get("/schema")
    async def schema() -> dict[str, Any]:
        """The JSON schema of a job spec, with the description, the bounds and the default of each field."""
        return JobSpec.model_json_schema()

    @router.post("/validate", openapi_extra=SPEC_BODY, responses=BODY_ERRORS)
    async def validate(request: Request) -> ValidationView:
        """Checks a job spec as a submission does, without submitting it, and tells every mistake with its fix."""
        tree = await bodies.tree(request)
        try:
            spec = await asyncio.to_thread(submission.check, tree)
        except InvalidJob as error:
            return ValidationView(
                valid=False, spec=None, mistakes=list(error.mistakes), detail=error.what, fix=error.fix
            )
        return ValidationView(valid=True, spec=_view(spec), mistakes=[], detail="", fix="", advice=advice(spec))

    return router


def add(router: APIRouter, store: Store) -> None:
    """Adds the route of one job's spec to those of jobs."""

    @router.get("/{job_id}/spec")
    async def spec(job_id: Id) -> SpecView:
        """The job's spec, and the part of it that differs from the defaults of this release."""
        tree = json.loads((await store.jobs.get(job_id)).spec_json)
        return SpecView(spec=tree, given=_given(tree, JobSpec.model_validate(tree).model_dump(exclude_defaults=True)))


def _view(spec: JobSpec) -> SpecView:
    tree = spec.model_dump(mode="json")
    return SpecView(spec=tree, given=_given(tree, spec.model_dump(exclude_defaults=True)))


def _given(tree: Any, named: Any) -> Any:
    """The part of `tree` that has the fields of `named`."""
    if isinstance(tree, dict) and isinstance(named, dict):
        return {key: _given(tree[key], value) for key, value in named.items() if key in tree}
    return tree
