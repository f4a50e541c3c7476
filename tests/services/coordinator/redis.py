"""A redis-server for tests of the store."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from millrace.contracts.v1 import fleet_pb2, work_pb2
from millrace.ids import JobId, PromptId, Purpose
from millrace.rest import JobState
from millrace.wire.channel import PROTOCOL_VERSION
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.observe.span_store import SpanStore
from services.coordinator.stages.run import Shared
from services.coordinator.state.bell import Bell
from services.coordinator.state.job import JobRecord
from services.coordinator.state.lease import QueuedPrompt
from services.coordinator.store import Holder, Store
from services.coordinator.work.queue import Queues

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


def shared(store: Store, fleet: Fleet) -> Shared:
    """What the partitions of a coordinator without servers share."""
    prometheus, queues = PrometheusMetrics(), Queues(fleet)
    spans = SpanStore(store, prometheus, queues.place)
    return Shared(
        store=store,
        whole_fleet=fleet,
        queues=queues,
        events=Events(store),
        prometheus=prometheus,
        spans=spans,
        control=Bell(),
        work_address="127.0.0.1:1",
    )


def registration(
    name: str = "member-a", kind: fleet_pb2.MemberKind = fleet_pb2.MEMBER_KIND_ROLLOUT, port: int = 1, **fields: Any
) -> fleet_pb2.RegisterRequest:
    """The request by which a member registers."""
    return fleet_pb2.RegisterRequest(
        member_id=name, kind=kind, address=f"127.0.0.1:{port}", protocol_version=PROTOCOL_VERSION, **fields
    )


def queued(prompt_id: str, purpose: Purpose = Purpose.TRAIN) -> QueuedPrompt:
    """A prompt to issue."""
    return QueuedPrompt(PromptId(prompt_id), purpose, work_pb2.Lease(prompt_id=prompt_id))
