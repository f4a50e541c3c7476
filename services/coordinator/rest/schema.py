"""The OpenAPI document: what FastAPI derives from the routes, and what it cannot see in them."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from millrace.rest import Problem
from millrace.spec import JobSpec

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


SPEC_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": inlined(JobSpec.model_json_schema())},
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}
"""The body of a submission. The route reads the body itself, so FastAPI does not know its type."""


def error_responses(descriptions: Mapping[int, str]) -> Responses:
    """Error answers of a route, from what each status means there."""
    return {status: {"model": Problem, "description": text} for status, text in descriptions.items()}


class Application(FastAPI):
    """FastAPI with an OpenAPI document that says how errors and event streams are really sent."""

    def openapi(self) -> dict[str, Any]:
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
    for content in answer.get("content", {}).values():
        if "$ref" in content.get("schema", {}):  # FastAPI adds "type": "string" to the model of a stream
            content["schema"] = {"$ref": content["schema"]["$ref"]}
