"""How ledger and trainer agree before a job goes on."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

from millrace.ids import Version
from services.coordinator.stages import configure
from tests.services.coordinator.redis import a_job


def test_as_the_ledger_goes_back_nothing_is_leased_and_trackers_are_told_again() -> None:
    queue, notes = SimpleNamespace(running_job="the past that is given up"), {"tracked": 3}
    seen: list[tuple[object, int]] = []

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    async def note(name: str) -> int:
        return notes[name]

    async def set_note(name: str, value: int) -> None:
        notes[name] = value

    async def rewind(version: Version) -> int:
        seen.append((queue.running_job, notes["tracked"]))
        return 0

    run: Any = SimpleNamespace(
        job=dataclasses.replace(a_job(), step=3, version=Version(3)),
        records=SimpleNamespace(batch=nothing, note=note, set_note=set_note),
        prompts=SimpleNamespace(rewind=rewind),
        evaluation=SimpleNamespace(forget=nothing),
        components=SimpleNamespace(queue=queue, trainer=SimpleNamespace(), fleet=SimpleNamespace(grow=nothing)),
        tell=nothing,
        refresh=nothing,
    )
    asyncio.run(configure._agree(run, Version(1)))
    assert seen == [(None, 1)]
