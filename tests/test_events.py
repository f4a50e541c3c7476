"""Every kind of event has one payload model, and events of other releases can be read."""

import json
import typing
from typing import Any

import pytest

from millrace.events import Event, EventData, EventKind, OtherRelease, Payload


def test_every_kind_has_one_payload() -> None:
    payloads: tuple[type[EventData], ...] = typing.get_args(Payload)
    assert sorted(str(payload.model_fields["kind"].default) for payload in payloads) == sorted(EventKind)
    assert set(payloads) == set(EventData.__subclasses__())


@pytest.mark.parametrize(
    ("kind", "data"),
    [("job.state", {"state": "running"}), ("prompt.dropped", {"prompt": "0-7"}), ("tracker.failed", {})],
)
def test_an_event_of_release_0_1_is_read(kind: str, data: dict[str, Any]) -> None:
    """Its payload does not name the kind."""
    read = Event.model_validate({"id": "1-0", "time_s": 1.0, "kind": kind, "message": "told", "data": data})
    assert read.kind == kind and isinstance(read.data, EventData)
    assert data.items() <= read.data.model_dump(mode="json").items()


@pytest.mark.parametrize(("kind", "data"), [("step.halved", {"step": 3}), ("step.done", {"other": [1]})])
def test_an_event_of_another_release_keeps_its_message_and_fields(kind: str, data: dict[str, Any]) -> None:
    read = Event.model_validate({"id": "1-0", "time_s": 1.0, "kind": kind, "message": "told", "data": data})
    assert isinstance(read.data, OtherRelease) and (read.kind, read.message) == (kind, "told")
    assert json.loads(read.model_dump_json())["data"] == {"kind": kind, **data}
