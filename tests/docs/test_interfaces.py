"""docs/events.md, docs/rest.md and docs/client.md are what docs/interfaces.py makes of the code."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from millrace.client import Client
from millrace.events import EventKind

DOCS = Path(__file__).resolve().parents[2] / "docs"


def interfaces() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interfaces", DOCS / "interfaces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["events.md", "rest.md", "client.md"])
def test_the_page_is_that_of_the_code(name: str) -> None:
    made: str = interfaces().PAGES[name]()
    assert (DOCS / name).read_text() == made, "python docs/interfaces.py"


def test_every_event_call_and_path_is_told() -> None:
    events, rest, client = ((DOCS / name).read_text() for name in ("events.md", "rest.md", "client.md"))
    assert [kind for kind in EventKind if f"\n## {kind}\n" not in events] == []
    for path in ("POST /v1/jobs", "GET /v1/jobs/{job_id}/events", "GET /v1/fleet", "GET /metrics"):
        assert f"\n## {path}\n" in rest
    public = [name for name, member in vars(Client).items() if inspect.isfunction(member) and name[0] != "_"]
    assert [name for name in public if f"\n## {name}\n" not in client] == []
    assert "object at 0x" not in client
