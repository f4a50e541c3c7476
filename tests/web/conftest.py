"""A browser and a coordinator with simulated members, for the tests of the page."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.stage import Stage, stage

VIEWS = {"desktop": (1280, 860), "phone": (390, 800)}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium: that of the system, or the one that CHROMIUM names."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert path, "chromium is missing: apt-get install chromium, or name one in CHROMIUM"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A trainer and two replicas."""
    with stage(tmp_path_factory.mktemp("stage")) as made:
        made.trainer()
        made.replica()
        made.replica()
        yield made


@pytest.fixture
def page(browser: Any, staged: Stage, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab of the page. It fails the test if the browser's console has an error. A parameter is (width, height,
    colour scheme)."""
    width, height, scheme = getattr(request, "param", (*VIEWS["desktop"], "light"))
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, base_url=staged.url)
    context.set_default_timeout(60_000)
    tab, told = context.new_page(), []
    tab.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: told.append(str(error)))
    yield tab
    context.close()
    assert not told, told


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> Path:
    """Where screenshots go: MILLRACE_PICTURES, or a temporary folder."""
    named = os.environ.get("MILLRACE_PICTURES")
    folder = Path(named) if named else request.getfixturevalue("tmp_path")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
