"""The page of the API needs no internet: whatever it names, the coordinator serves."""

import re

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from millrace.errors import Unavailable
from services.coordinator.rest import pages as documentation
from services.coordinator.rest.problems import install


def site() -> TestClient:
    app = FastAPI(title="Millrace", docs_url=None, redoc_url=None)
    install(app)
    documentation.add(app)
    return TestClient(app)


def test_everything_that_the_page_loads_comes_from_the_coordinator() -> None:
    client = site()
    page = client.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    named = re.findall(r"(?:src|href|url)\s*[=:]\s*[\"']([^\"']+)", page.text)
    assert len(named) >= 4 and all(each.startswith("/") and not each.startswith("//") for each in named)
    found = {each: client.get(each) for each in named}
    assert {each: answer.status_code for each, answer in found.items()} == dict.fromkeys(named, 200)
    assert "javascript" in found["/docs/assets/swagger-ui-bundle.js"].headers["content-type"]
    assert "SwaggerUIBundle" in found["/docs/assets/swagger-ui-bundle.js"].text


def test_without_the_package_the_page_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation, "PACKAGE", "no_such_package")
    answer = site().get("/docs")
    assert answer.status_code == 503 and "fastapi-offline is not installed" in answer.json()["detail"]
    assert Unavailable.__name__ not in answer.text and "[coordinator]" in answer.json()["fix"]
