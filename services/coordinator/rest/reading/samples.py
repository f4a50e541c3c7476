"""/v1/jobs/{job_id}/groups and /tokens: the samples of a job group by group, and the tokens of one group."""

import asyncio
import json
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi import Path as InPath

from millrace.errors import NotFound
from millrace.rest import GroupPage, TokensView
from services.coordinator.observe import groups, tokens
from services.coordinator.rest.parameters import LARGEST_STEP, Id
from services.coordinator.store import Store

Text = Annotated[str, Query(max_length=200)]
RECORD = r"^\d{1,19}-\d{1,19}$"


def add(router: APIRouter, store: Store) -> None:
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
