"""How ledger and trainer agree before a job goes on."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jsonschema

from millrace import __version__
from millrace.errors import InvalidJob
from millrace.ids import Version
from millrace.rest import JobState
from services.coordinator.stages import configure
from services.coordinator.store.prompts import Rewound
from tests.services.coordinator.cluster import Cluster, named, scenario
from tests.services.coordinator.redis import a_job
from tests.spec.test_released_specs import RELEASES, schema


def test_as_the_ledger_goes_back_nothing_is_leased_and_trackers_are_told_again() -> None:
    queue, notes = SimpleNamespace(running_job="the past that is given up"), {"tracked": 3}
    seen: list[tuple[object, int]] = []

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    async def note(name: str) -> int:
        return notes[name]

    async def set_note(name: str, value: int) -> None:
        notes[name] = value

    async def rewind(version: Version) -> Rewound:
        seen.append((queue.running_job, notes["tracked"]))
        return Rewound(0, 0, 0)

    run: Any = SimpleNamespace(
        job=dataclasses.replace(a_job(), step=3, version=Version(3)),
        records=SimpleNamespace(batch=nothing, note=note, set_note=set_note),
        prompts=SimpleNamespace(rewind=rewind),
        forget_evaluation=nothing,
        components=SimpleNamespace(queue=queue, trainer=SimpleNamespace(), fleet=SimpleNamespace(grow=nothing)),
        tell=nothing,
        refresh=nothing,
    )
    asyncio.run(configure._agree(run, Version(1)))
    assert seen == [(None, 1)]


@scenario
async def test_members_of_the_last_release_serve_a_job_that_uses_no_newer_field(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    """They refuse what is not in their schema, as theirs does."""
    last = next(each for each in reversed(RELEASES) if not __version__.startswith(f"{each.name}."))
    known, asked = schema(last), list[str]()

    async def check(request: Any) -> None:
        asked.append(request.spec)
        try:
            jsonschema.validate(json.loads(request.spec), known)
        except jsonschema.ValidationError as error:
            raise InvalidJob(error.message, "use a member of this release.") from error

    for member in (await cluster.trainer(), await cluster.replica()):
        member.faults["Configure"] = check
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and len(asked) >= 2
    newer = named(spec, "newer") | {"notes": "of this release"}
    job = await cluster.ended(await cluster.submit(newer))
    assert job.state is JobState.FAILED and "notes" in str(job.failure)
