"""The OpenAPI document: what FastAPI derives from the routes, and what it cannot see in them."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, params

from millrace.rest import Problem
from millrace.spec import JobSpec
from millrace.spec.job import Notes

PROBLEM_TYPE = "application/problem+json"
Responses = dict[int | str, dict[str, Any]]
"""Answers of a route by status, as FastAPI takes them."""


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with every reference replaced by its target: references of a request body would be looked up in the
    OpenAPI document, which does not have them."""
    parts = schema.pop("$defs", {})

    def whole(tree: Any) -> Any:
        if isinstance(tree, list):
            return [whole(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        named = parts.get(str(tree.get("$ref", "")).rpartition("/")[2], {})
        return {key: whole(value) for key, value in {**named, **tree}.items() if key != "$ref"}

    result: dict[str, Any] = whole(schema)
    return result


def _body(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """The body of a request, as JSON of that schema or as YAML. The routes read it themselves, so FastAPI does not know
    its type."""
    content = {"application/json": {"schema": schema}, "application/yaml": {"schema": {"type": "string"}}}
    return {"requestBody": {"required": required, "content": content}}


SPEC_BODY = _body(inlined(JobSpec.model_json_schema()))
"""The body of a submission."""
CHANGES_BODY = _body({"type": "object"}, required=False)
"""The body of a request to resume a job: some of the fields of its spec."""
NOTES_BODY = _body(Notes.model_json_schema())
"""The body of a request to change tags and notes."""
HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string", "const": "Bearer"}}},
    405: {
        "Allow": {
            "required": True,
            "description": "The methods that this path takes.",
            "schema": {"type": "string"},
        }
    },
    429: {"Retry-After": {"required": True, "description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}},
}
"""Headers of error answers by status."""


def error_responses(descriptions: Mapping[int, str]) -> Responses:
    """Error answers of a route, from what each status means there. `Application` adds that all are a Problem."""
    return {
        status: {"description": text} | ({"headers": HEADERS[status]} if status in HEADERS else {})
        for status, text in descriptions.items()
    }


BODY_ERRORS = error_responses(
    {
        408: "The body was not sent in time.",
        413: "The body is too large for a job spec.",
        415: "The body is neither JSON nor YAML.",
        422: "The body has mistakes.",
    }
)
"""Error answers of a route that takes a body."""
EVERYWHERE = error_responses({405: "The path does not take this method."})
"""Error answers of every path. They alone name the type, for its place among the schemas: it takes time for each route
and each answer that does."""
EVERYWHERE[405] |= {"model": Problem}
CALLERS = error_responses(
    {
        401: "The token is missing or wrong.",
        403: "The role of the token does not allow it, or the request comes from a web page of another site.",
        429: "Too many requests are in progress.",
        503: "Redis does not answer.",
    }
)
"""Error answers of every path that asks who the caller is."""

Guards = Sequence[params.Depends]
"""What every request goes through that asks who the caller is."""


def subject(prefix: str, tag: str, guards: Guards, responses: Responses | None = None) -> APIRouter:
    """A router for the endpoints of one subject. Its routes are complete, as `Application.take` takes them."""
    answers = EVERYWHERE | CALLERS | (responses or {})
    return APIRouter(prefix=prefix, tags=[tag], dependencies=guards, responses=answers)


class Application(FastAPI):
    """FastAPI with an OpenAPI document that says how errors and event streams are really sent."""

    def take(self, router: APIRouter) -> None:
        """Serves the routes of a router. `include_router` would make each of them a second time, which doubles the time
        until a coordinator answers."""
        self.router.routes.extend(router.routes)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema:
            return self.openapi_schema
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                for status, answer in operation["responses"].items():
                    _correct(status, answer)
        for derived in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(derived, None)
        return document


def _correct(status: str, answer: dict[str, Any]) -> None:
    if int(status) >= 400:
        answer["content"] = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
        return
    if stream := answer.get("content", {}).get("text/event-stream"):
        document = {"$ref": stream["schema"]["$ref"]}  # FastAPI adds "type": "string"
        text = {"type": "string"}
        data = text | {"contentMediaType": "application/json", "contentSchema": document}
        parts = {"id": text, "event": text, "data": data}
        stream["schema"] = {"type": "object", "required": [*parts], "properties": parts}
