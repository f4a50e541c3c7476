"""Makes the types of the page from the models of REST: `python web/rest_types.py > web/src/rest.ts`.

The compiler then refuses a page that reads a field which the models do not have.
"""

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from millrace import events, rest
from millrace.report import JobReport
from millrace.rest.diagnosis import DiagnosisView
from millrace.rest.timeline import TimelineView

ROOTS = (
    rest.JobPage,
    rest.JobView,
    rest.LedgerView,
    rest.FleetView,
    rest.LogView,
    rest.GroupPage,
    rest.TokensView,
    rest.SeriesView,
    rest.HistogramView,
    rest.MetricView,
    rest.SpecView,
    rest.ValidationView,
    rest.StepMetrics,
    rest.Problem,
    events.Event,
    TimelineView,
    DiagnosisView,
    JobReport,
)
"""What the page and the report read; models that these hold come with them."""
PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
Schema = Mapping[str, Any]


def page() -> str:
    """The TypeScript file."""
    _, schema = models_json_schema([(model, "serialization") for model in ROOTS])
    parts = [_declaration(name, each) for name, each in sorted(schema["$defs"].items())]
    return "\n\n".join(["/* Made by web/rest_types.py from millrace/rest and millrace/events. */", *parts]) + "\n"


def _declaration(name: str, schema: Schema) -> str:
    comment = f"/** {' '.join(schema['description'].split())} */\n" if "description" in schema else ""
    if "properties" not in schema:
        return f"{comment}export type {name} = {_type(schema)};"
    fields = [f"  {field}: {_type(each)};" for field, each in schema["properties"].items()]
    if schema.get("additionalProperties"):
        fields.append("  [other: string]: unknown;")
    return "\n".join([f"{comment}export interface {name} {{", *fields, "}"])


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(_type(each) for each in either))
    kind = schema.get("type")
    if kind == "array":
        items = _type(schema.get("items", {}))
        return f"({items})[]" if "|" in items else f"{items}[]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_type(values) if isinstance(values, Mapping) else 'unknown'}>"
    if isinstance(kind, list):
        return " | ".join(PLAIN[each] for each in kind)
    return PLAIN.get(str(kind), "unknown")


if __name__ == "__main__":
    print(page(), end="")
