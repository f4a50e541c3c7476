"""How ledger and trainer agree before a job goes on."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

from millrace.ids import Version
from services.coordinator.stages import configure
from tests.services.coordinator.redis import a_job


def test_nothing_is_leased_while_the_ledger_goes_back() -> None:
    queue, leased_for = SimpleNamespace(standing="the past that is given up"), []

    async def looks(*_: Any, **__: Any) -> int:
        leased_for.append(queue.standing)
        return 0

    run: Any = SimpleNamespace(
        job=dataclasses.replace(a_job(), step=3, version=Version(3)),
        records=SimpleNamespace(batch=looks, note=looks, set_note=looks),
        prompts=SimpleNamespace(rewind=looks),
        evaluation=SimpleNamespace(forget=looks),
        parts=SimpleNamespace(queue=queue, trainer=SimpleNamespace(), fleet=SimpleNamespace(grow=looks)),
        tell=looks,
        refresh=looks,
    )
    asyncio.run(configure._agree(run, Version(1)))
    assert set(leased_for[1:]) == {None}
