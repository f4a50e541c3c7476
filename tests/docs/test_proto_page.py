"""The page that docs/proto_page.py makes of the contracts tells every method, message and value."""

import re
from pathlib import Path

from millrace.wire.deadlines import DEADLINES_S
from tests.docs.scripts import script

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE: str = script("proto_page").page()


def test_every_file_method_and_type_is_told_and_links_lead_somewhere() -> None:
    files = sorted((DOCS.parent / "proto/millrace/v1").glob("*.proto"))
    text = "\n".join(path.read_text() for path in files)
    sections = re.findall(r"^#{2,3} (\S+)$", PAGE, re.MULTILINE)
    types = re.findall(r"^(?:service|message|enum) (\w+)", text, re.MULTILINE)
    assert sorted(sections) == sorted([path.name for path in files] + types)
    methods = re.findall(r"^  rpc (\w+)\(", text, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \| \[", PAGE, re.MULTILINE) and all(f"| `{name}` | [" in PAGE for name in methods)
    assert (
        "| `Heartbeat` | [HeartbeatRequest](#heartbeatrequest) → [HeartbeatResponse](#heartbeatresponse) | 5 s |"
        in PAGE
    )
    assert {link for link in re.findall(r"\(#(\w+)\)", PAGE)} <= {name.lower() for name in types}
    assert len(methods) == len(DEADLINES_S) - 1  # Health is gRPC's own
