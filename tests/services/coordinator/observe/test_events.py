"""The event log keeps what is declared in millrace/events, and nothing else."""

import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from millrace.events import Event, EventKind, JobMoved, LeaseExpired, Payload, StepDone
from millrace.ids import JobId, PromptId
from millrace.rest import JobState
from services.coordinator.observe.events import Events
from services.coordinator.rest.jobs import frame
from services.coordinator.stages.run import Run
from services.coordinator.store import Store
from services.coordinator.store.records import Records
from tests.services.coordinator.redis import with_store

pytestmark = pytest.mark.slow

SHARES = st.floats(0, 1)
ANY_PAYLOAD = st.one_of(
    [
        st.builds(
            payload, **{name: SHARES for name, field in payload.model_fields.items() if field.annotation is float}
        )
        for payload in typing.get_args(Payload)
    ]
)
"""Payloads whose floats are shares, as all are that they have: JSON has no infinity."""


@pytest.mark.parametrize("emit", [Events.add, Records.add_event, Run.tell])
def test_only_a_declared_payload_can_be_emitted(emit: Any) -> None:
    """mypy checks every call; this holds the signature that it checks them against."""
    assert typing.get_type_hints(emit)["data"] == Payload


def test_a_payload_that_is_not_declared_is_refused(redis_url: str) -> None:
    class Undeclared(BaseModel):
        kind: str = EventKind.STEP_DONE

    async def scenario(store: Store) -> None:
        undeclared: Any = Undeclared()
        with pytest.raises(TypeError, match="Undeclared"):
            await store.records(JobId("job-0")).add_event(undeclared, "not told")
        assert await store.records(JobId("job-0")).events() == []

    with_store(redis_url, scenario)


def test_the_log_keeps_payloads(redis_url: str) -> None:
    examples = [
        JobMoved(state=JobState.QUEUED),
        StepDone(step=1, reward=float("inf"), seconds=0.5),
        LeaseExpired(prompts=[PromptId("0-1")]),
    ]

    async def scenario(store: Store) -> None:
        records = store.records(JobId("job-1"))
        ids = [await records.add_event(payload, f"message {n}") for n, payload in enumerate(examples)]
        found = await records.events()
        assert [event.id for event in found] == ids
        assert [event.message for event in found] == ["message 0", "message 1", "message 2"]
        assert [event.data for event in found] == examples

    with_store(redis_url, scenario)


@given(ANY_PAYLOAD)
def test_a_client_reads_what_was_emitted(payload: Any) -> None:
    event = Event(id="1-0", time_s=1.0, message="told", data=payload)
    (data,) = [line for line in frame(event).decode().splitlines() if line.startswith("data: ")]
    assert repr(Event.model_validate_json(data.removeprefix("data: "))) == repr(event)


def test_what_is_sent_is_json_where_a_number_is_not_finite() -> None:
    told = {"id": "1-0", "time_s": 1.0, "kind": "new.kind", "message": "", "data": {"seconds": float("inf")}}
    (data,) = [line for line in frame(Event.model_validate(told)).decode().splitlines() if line.startswith("data: ")]
    assert json.loads(data.removeprefix("data: "), parse_constant=pytest.fail)["data"]["seconds"] is None
