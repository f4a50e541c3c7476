"""The site: every page has its place, the names on the tutorial's pages exist, and it is built without a warning."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.spec import JobSpec
from millrace.telemetry.metrics.catalogue import find
from millrace.validation.fields import model_in

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
TUTORIAL = tuple(f"tutorial/{path.name}" for path in sorted((ROOT / "docs/tutorial").glob("*.md")))
FOR_NEWCOMERS = ("concepts.md", "troubleshooting.md", *TUTORIAL)
METRICS = "actor|critic|memory|perf|publication|response_length|rollout_corr|timing_s|training"
METRIC = re.compile(rf"`((?:{METRICS})/[\w/@]+)`")


def places(nav: Any) -> Iterator[str]:
    """The pages in the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from places(part)


def is_field(path: str) -> bool:
    """Whether the job spec has the field. What lies in a mapping of options may have any name."""
    model: Any = JobSpec
    for part in path.split("."):
        if model is None:
            return True
        if part not in model.model_fields:
            return False
        model = model_in(model.model_fields[part].annotation)
    return True


def test_every_page_has_its_place_once() -> None:
    found = list(places(SETTINGS["nav"]))
    assert len(found) == len(set(found))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(found)
    hook = (ROOT / SETTINGS["hooks"][0]).read_text()
    for place in set(found) - pages:  # those that the hook adds
        assert f'": "{place}"' in hook or f'"{place}": "' in hook


@pytest.mark.parametrize("page", FOR_NEWCOMERS)
def test_fields_and_metrics_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    sections = "|".join(JobSpec.model_fields)
    named = set(re.findall(rf'(?:`|--set "?)((?:{sections})\.[\w.]+)', text))
    assert {name for name in named if not name.endswith(".py") and not is_field(name)} == set()
    assert [name for name in METRIC.findall(text) if find(name) is None] == []


def test_links_lead_to_pages_of_the_site() -> None:
    pytest.importorskip("mkdocs")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from site_hook import rewritten, slug
    finally:
        sys.path.pop(0)
    page = "[a](../README.md#your-own-job) [b](running.md) ![c](step.svg) [proto](../proto/millrace/v1) [d](#x) [e](https://x)"
    told = "[a](../index.md#your-own-job) [b](../running.md) ![c](../step.svg) proto (`proto/millrace/v1`) [d](#x) [e](https://x)"
    assert rewritten(page, "docs/tracing.md", "tutorial/tracing.md") == told
    assert rewritten("```\n[a](../README.md)\n```", "docs/a.md", "a.md") == "```\n[a](../README.md)\n```"
    assert slug("`rollout.engine_options`: a & b") == "rolloutengine_options-a--b"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    loaded = [
        found
        for path in tmp_path.rglob("*.html")
        for found in re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', path.read_text())
    ]
    assert loaded == [], "the site needs the internet"
    assert all(
        (tmp_path / page).is_file() for page in ("tutorial/start.html", "rest.html", "client.html", "proto.html")
    )
    assert not list(tmp_path.rglob("*.py"))
