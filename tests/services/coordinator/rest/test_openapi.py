"""Schemathesis over the whole OpenAPI document: no answer has a status, a header or a body that is not in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.services.coordinator.conftest import CoordinatorProcess, running

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
TOKEN = "the-token-of-this-test"


@pytest.fixture(scope="module", params=["", TOKEN], ids=["open", "token"])
def coordinator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CoordinatorProcess]:
    environment = {"MILLRACE_TOKEN": request.param, "MILLRACE_TOKEN_FILE": ""}
    with running(tmp_path_factory.mktemp("coordinator"), environment=environment) as process:
        yield process


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.matrix)])
def test_every_answer_is_in_the_document(coordinator: CoordinatorProcess, examples: int, spec: dict[str, Any]) -> None:
    """`make test` has a few requests for each operation."""
    base = f"http://127.0.0.1:{coordinator.http_port}"
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=base, headers=bearer, trust_env=False) as http:
        job_id = http.post("/v1/jobs", json=spec).json()["id"]
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 15
    for operation in operations:

        @given(case=operation.as_strategy(), known=..., authorized=...)
        @settings(
            max_examples=examples,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def answers(case: Any, known: bool, authorized: bool) -> None:
            if known and "job_id" in case.path_parameters:
                case.path_parameters["job_id"] = job_id
            if "follow" in (case.query or {}):
                case.query["follow"] = False  # the job waits for a trainer: its events do not end
            elif case.operation.path.endswith("/events"):
                case.query = {"follow": False}
            headers = bearer if authorized else {"Authorization": "Bearer wrong"}
            case.call_and_validate(headers=headers, checks=CHECKS, timeout=20)

        answers()
    assert "Traceback" not in coordinator.log()


def test_a_method_that_a_path_does_not_take(coordinator: CoordinatorProcess) -> None:
    base = f"http://127.0.0.1:{coordinator.http_port}"
    with httpx.Client(base_url=base, trust_env=False) as http:
        document = http.get("/openapi.json").json()
        for template, operations in document["paths"].items():
            path = template.replace("{job_id}", "job-0123456789ab").replace("{member_id}", "rollout-1")
            answer = http.request("PUT", path)
            assert answer.status_code == 405 and answer.headers["content-type"] == "application/problem+json"
            assert set(answer.headers["allow"].split(", ")) == {method.upper() for method in operations}
            assert answer.json()["type"] == "urn:millrace:problem:method-not-allowed"


def test_the_document_has_every_refusal(coordinator: CoordinatorProcess) -> None:
    base = f"http://127.0.0.1:{coordinator.http_port}"
    document = httpx.get(f"{base}/openapi.json", trust_env=False).json()
    asked = {path: operations for path, operations in document["paths"].items() if path.startswith("/v1/")}
    for path, operations in asked.items():
        for operation in operations.values():
            assert {"401", "403", "405", "429", "503"} <= set(operation["responses"]), path
    assert {"408", "409", "413", "415", "422"} <= set(asked["/v1/jobs"]["post"]["responses"])
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                assert int(status) < 400 or list(answer["content"]) == ["application/problem+json"]


def test_problem_types_are_uris(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    base = f"http://127.0.0.1:{coordinator.http_port}"
    with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
        kinds = [
            http.get("/v1/jobs/none").json()["type"],
            http.get("/v1/nowhere").json()["type"],
            http.post("/v1/jobs", json={}).json()["type"],
            http.post("/v1/jobs", content=b"x").json()["type"],
            http.get("/v1/jobs/job-0123456789ab/samples?limit=0").json()["type"],
        ]
    names = ["not-found", "not-found", "invalid-job", "unsupported-media-type", "invalid-request"]
    assert kinds == [f"urn:millrace:problem:{name}" for name in names]
