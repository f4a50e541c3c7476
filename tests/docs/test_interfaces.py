"""docs/events.md is what docs/interfaces.py makes of the code; its pages tell every event, path and call."""

import inspect
from pathlib import Path

from millrace.client import Client
from millrace.events import EventKind
from tests.docs.scripts import script

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_that_of_the_code() -> None:
    assert (DOCS / "events.md").read_text() == script("interfaces").events_page(), "python docs/interfaces.py"


def test_every_event_call_and_path_is_told() -> None:
    pages = script("interfaces").PAGES
    events, rest, client = (pages[name]() for name in ("events.md", "rest.md", "client.md"))
    assert [kind for kind in EventKind if f"\n## {kind}\n" not in events] == []
    for path in ("POST /v1/jobs", "GET /v1/jobs/{job_id}/events", "GET /v1/fleet", "GET /metrics"):
        assert f"\n## {path}\n" in rest
    public = [name for name, member in vars(Client).items() if inspect.isfunction(member) and name[0] != "_"]
    assert [name for name in public if f"\n## {name}\n" not in client] == []
    assert "object at 0x" not in client
