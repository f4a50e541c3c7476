"""A redis-server for tests of the store."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millrace.contracts.v1 import work_pb2
from millrace.ids import JobId, PromptId, Purpose
from millrace.rest import JobState
from services.coordinator.state.job import JobRecord
from services.coordinator.state.lease import QueuedPrompt
from services.coordinator.store import Holder, Store

Answer = TypeVar("Answer")


def with_store(url: str, scenario: Callable[[Store], Awaitable[Answer]]) -> Answer:
    """Runs `scenario` on an empty store."""

    async def run() -> Answer:
        store = Store(url)
        try:
            await store.connection.do("FLUSHALL")
            return await scenario(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def lead(store: Store) -> None:
    """Makes the store's later writes those of the coordinator that leads."""
    assert await store.lead(Holder("here", "127.0.0.1:1", "http://127.0.0.1:2"), 60.0, back=True) is None


def a_job(number: int = 1) -> JobRecord:
    return JobRecord(
        id=JobId(f"job-{number:012x}"),
        name="sums",
        state=JobState.QUEUED,
        spec_json=json.dumps({"output": f"/out/{number}"}),
        created_s=float(number),
    )


def queued(prompt_id: str, purpose: Purpose = Purpose.TRAIN) -> QueuedPrompt:
    """A prompt to issue."""
    return QueuedPrompt(PromptId(prompt_id), purpose, work_pb2.Lease(prompt_id=prompt_id))
