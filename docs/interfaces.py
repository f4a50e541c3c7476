"""Makes the pages on what programs use: `python docs/interfaces.py` writes docs/events.md; `make docs` makes the
pages on REST and the client for the site.

They come from the payloads in `millrace/events/`, from the coordinator's OpenAPI document and from the docstrings of
`millrace/client/`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from pydantic import BaseModel

from millrace import events
from millrace.client import Client
from millrace.events import Event, Payload

DOCS = Path(__file__).resolve().parent
MADE = "This page is made by `python docs/interfaces.py` from {}: edit that, not this page."
EVENTS = f"""# Events

{MADE.format("the payloads in `millrace/events/`")}

A job's log has one event for each thing that happened, in order. `millrace events JOB --follow` prints it,
`GET /v1/jobs/JOB/events` streams it as server-sent events, `Client.events` yields it. Each has:"""
REST = """# REST API

This page comes from the coordinator's OpenAPI document.

The coordinator serves it at port 7700; `/openapi.json` is the document itself, `/docs` a page to try it. Where the
services share a token, every path under `/v1` wants it, or a user's, as `Authorization: Bearer TOKEN`
([security.md](security.md#users-tokens-and-roles) has the roles). An error is a problem document
(RFC 9457) with its `fix`. A job spec is described in [job.md](job.md), an event in [events.md](events.md)."""
CLIENT = """# Python client

This page comes from the docstrings of `millrace/client/`.

```python
from millrace.client import Client
from millrace.spec import load

with Client() as client:
    job = client.submit(load("job.yaml"))
    for event in client.events(job.id):
        print(event.message)
```

Every call has a deadline, and is repeated while the coordinator or its Redis is not available. Errors are
`MillraceError`s with a `fix` (`millrace/errors.py`). The views that calls answer are those of the
[REST API](rest.md#schemas)."""
WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
    "null": "null",
}
Schema = Mapping[str, Any]
NONE: Mapping[str, Schema] = {}


def events_page() -> str:
    fields = _table(("field", "type", "what it is"), _fields(Event.model_json_schema(mode="serialization")))
    kinds = [_payload(payload) for payload in get_args(Payload)]
    return "\n\n".join([EVENTS, fields, "`data` depends on the kind.", *kinds]) + "\n"


def _payload(payload: type[BaseModel]) -> str:
    schema = payload.model_json_schema(mode="serialization")
    rows = [row for row in _fields(schema, schema.get("$defs", {})) if row[0] != "`kind`"]
    parts = [f"## {payload.model_fields['kind'].default}", _text(payload.__doc__), f"`{payload.__name__}`"]
    return "\n\n".join([*parts, _table(("field", "type", "what it is"), rows)] if rows else parts)


def rest_page() -> str:
    document = _openapi()
    payloads = {payload.__name__ for payload in get_args(Payload)} | {"Event", events.MemberTransfer.__name__}
    schemas = document["components"]["schemas"]
    schemas_text = [_schema(name, schema) for name, schema in sorted(schemas.items()) if name not in payloads]
    paths = [(path, method, call) for path, methods in document["paths"].items() for method, call in methods.items()]
    public = [call["responses"] for path, _, call in paths if path.startswith("/v1")]
    common = {code for code in public[0] if all(each.get(code) == public[0][code] for each in public)}
    answers = _answers({code: public[0][code] for code in common})
    everywhere = f"Every path under `/v1` may also answer:\n\n{answers}"
    calls = [_call(method, path, call, common) for path, method, call in paths]
    return "\n\n".join([REST, everywhere, *calls, "## Schemas", *(part for part in schemas_text if part)]) + "\n"


def _openapi() -> dict[str, Any]:
    from services.coordinator.rest.app import application

    class Absent(SimpleNamespace):
        """Stands for every component: the routes take them and call nothing before a request comes."""

        def __getattr__(self, name: str) -> Any:
            return Absent()

        def __call__(self, *_: Any) -> None:
            """Does nothing."""

    absent: Any = Absent()
    return application(absent, absent, absent, absent, "127.0.0.1").openapi()


def _call(method: str, path: str, call: Schema, common: Collection[str]) -> str:
    parts = [f"## {method.upper()} {path}", _text(call.get("description"))]
    if parameters := call.get("parameters"):
        rows = [
            [f"`{one['name']}`", one["in"], _type(one.get("schema", {})), one.get("description", "")]
            for one in parameters
        ]
        parts.append(_table(("parameter", "in", "type", "what it is"), rows))
    own = {code: answer for code, answer in call["responses"].items() if code not in common}
    return "\n\n".join([*(part for part in parts if part), _answers(own)])


def _answers(responses: Mapping[str, Schema]) -> str:
    rows = [[code, _content(answer), _text(answer.get("description"))] for code, answer in sorted(responses.items())]
    return _table(("status", "body", "when"), rows)


def _content(answer: Schema) -> str:
    kinds = answer.get("content", {})
    return ", ".join(f"{_type(content.get('schema', {}))}" for content in kinds.values())


def _schema(name: str, schema: Schema) -> str:
    parts = [f"### {name}", _text(schema.get("description"))]
    if "enum" in schema:
        parts.append(", ".join(f"`{value}`" for value in schema["enum"]))
    elif rows := _fields(schema):
        parts.append(_table(("field", "type", "what it is"), rows))
    return "\n\n".join(part for part in parts if part)


def _fields(schema: Schema, known: Mapping[str, Schema] = NONE) -> list[list[str]]:
    fields = schema.get("properties", {}).items()
    return [[f"`{name}`", _type(field, known), _text(field.get("description"))] for name, field in fields]


def _type(schema: Schema, known: Mapping[str, Schema] = NONE) -> str:
    """The type in words: `whole number`, `list of JobSummary`, `text or null`. Enumerations among the `known` schemas
    are written out; other schemas are named."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return _type(known[name]) if "enum" in known.get(name, {}) else name
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if several := schema.get("anyOf") or schema.get("oneOf"):
        if len(several) > 6:
            return "one of the payloads below"
        return " or ".join(dict.fromkeys(_type(one, known) for one in several))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), known)}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"mapping to {_type(schema['additionalProperties'], known)}"
    return WORDS.get(str(schema.get("type")), "anything")


def client_page() -> str:
    members = [(name, member) for part in (Client, *Client.__bases__) for name, member in vars(part).items()]
    methods = [(name, member) for name, member in members if inspect.isfunction(member) and name[0] != "_"]
    about = f"## Client\n\n```python\nClient{_signature(Client.__init__)}\n```\n\n{_paragraphs(Client.__doc__)}"
    return "\n\n".join([CLIENT, about, *(_method(name, member) for name, member in methods)]) + "\n"


def _method(name: str, member: Callable[..., Any]) -> str:
    text = _paragraphs(member.__doc__) or "Ends the client's connections."
    return f"## {name}\n\n```python\nclient.{name}{_signature(member)}\n```\n\n{text}"


def _signature(member: Callable[..., Any]) -> str:
    signature = inspect.signature(member)
    parameters = [one.replace() for name, one in signature.parameters.items() if name != "self"]
    text = str(signature.replace(parameters=parameters))
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text).removesuffix(" -> None")


def _paragraphs(text: str | None) -> str:
    return inspect.cleandoc(text or "").strip()


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(columns)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PAGES = {"events.md": events_page, "rest.md": rest_page, "client.md": client_page}

if __name__ == "__main__":
    (DOCS / "events.md").write_text(events_page(), encoding="utf-8")
    print(DOCS / "events.md", file=sys.stderr)
