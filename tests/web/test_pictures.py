"""Screenshots of every view, light, dark and on a phone, and what axe finds in them.

`MILLRACE_PICTURES=FOLDER make test-web TESTS=tests/web/test_pictures.py` keeps the pictures.
"""

from pathlib import Path
from typing import Any

import pytest

from millrace.rest import JobState
from tests.web.conftest import VIEWS
from tests.web.stage import Stage

pytestmark = [pytest.mark.web, pytest.mark.timeout(300)]
AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
LOOKS = [(*VIEWS["desktop"], "light"), (*VIEWS["desktop"], "dark"), (*VIEWS["phone"], "dark")]


COLOURINGS = {"samples": "log-probability", "gap": "engine − trainer", "advantage": "advantage"}
"""How the views of a group's tokens are coloured."""


@pytest.fixture(scope="module")
def job_ids(staged: Stage) -> list[str]:
    found = []
    for number in (1, 2):
        trainer = {"token_budget": 2048, "optimizer": {"lr": number * 1e-6}}
        found.append(staged.submit(staged.spec(f"arithmetic-{number}", 24, trainer=trainer)))
    for job_id in found:
        assert staged.coordinator.client.wait(job_id, 200).state is JobState.SUCCEEDED
    return found


def views(first: str, second: str) -> dict[str, tuple[str, str]]:
    """Address of each view, and what is there as soon as it shows its data."""
    return {
        "jobs": ("jobs", ".row.job"),
        "job": (f"job/{first}", ".chart canvas"),
        "distributions": (f"job/{first}", ".chart canvas"),
        "timeline": (f"job/{first}/timeline/5", ".lanes canvas"),
        "samples": (f"job/{first}/samples/7", ".row.group"),
        "gap": (f"job/{first}/samples/7", ".row.group"),
        "advantage": (f"job/{first}/samples/7", ".row.group"),
        "records": (f"job/{first}/records", ".phases"),
        "events": (f"job/{first}/events", ".row.event"),
        "spec": (f"job/{first}/spec", "table.spec"),
        "compare": (f"compare/{first},{second}", ".chart canvas"),
        "new-job": ("submit", ".mistakes"),
        "fleet": ("fleet", ".row.member"),
        "member": ("fleet", ".row.member"),
    }


@pytest.mark.parametrize("page", LOOKS, indirect=True, ids=["light", "dark", "phone"])
def test_every_view_is_complete_and_accessible(
    page: Any, job_ids: list[str], pictures: Path, request: pytest.FixtureRequest
) -> None:
    assert AXE.is_file(), "axe-core is missing: run `make web`"
    look, serious = request.node.callspec.id, []
    for name, (path, selector) in views(*job_ids).items():
        page.goto("about:blank")
        page.goto(f"/#/{path}")
        page.locator(selector).first.wait_for()
        if name == "distributions":
            page.locator("summary", has_text="Distributions").scroll_into_view_if_needed()
            page.locator("figure.distribution canvas").last.scroll_into_view_if_needed()
        if name in COLOURINGS:
            page.get_by_role("option").first.click()
            page.get_by_role("button", name="tokens").click()
            page.get_by_role("button", name=COLOURINGS[name]).click()
            page.locator("pre.tokens span").first.wait_for()
        if name == "member":
            page.get_by_role("button", name="details…").last.click()
            page.get_by_role("region", name="Usage").wait_for()
            page.get_by_role("log").or_(page.get_by_text("It has logged nothing.")).wait_for()
        page.wait_for_load_state("networkidle") if name in ("spec", "new-job") else None
        page.screenshot(path=str(pictures / f"{name}-{look}.png"))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the window"
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run({resultTypes: ['violations']})")
        for each in found["violations"]:
            if each["impact"] in ("serious", "critical"):
                serious.append((name, each["id"], [node["target"] for node in each["nodes"]][:3]))
    assert not serious, serious
