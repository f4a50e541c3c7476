"""A report in headless Chromium, opened from the disk: no coordinator, no network."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.report import JobReport, gather, report_page
from millrace.rest import JobState
from tests.report.contents import hostile_contents
from tests.web.conftest import VIEWS
from tests.web.stage import Stage
from tests.web.test_driven import expect
from tests.web.test_pictures import AXE, LOOKS

pytestmark = [pytest.mark.web, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(staged: Stage) -> JobReport:
    """The report of a job with evaluations, publications, checkpoints and histograms."""
    job_id = staged.submit(staged.spec("arithmetic", 24))
    assert staged.coordinator.client.wait(job_id, 200).state is JobState.SUCCEEDED
    return gather(staged.coordinator.client, job_id, samples=32)


@pytest.fixture
def opened(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[JobReport], Any]]:
    """Opens a report as a file. The test fails if the console has an error, or if the file asks for anything else."""
    width, height, scheme = getattr(request, "param", (*VIEWS["desktop"], "light"))
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    context.set_default_timeout(60_000)
    tab, told, path = context.new_page(), [], tmp_path / "report.html"
    tab.on("console", lambda message: told.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: told.append(str(error)))
    tab.on("dialog", lambda dialog: (told.append(dialog.message), dialog.dismiss()))
    tab.on("request", lambda asked: told.append(asked.url) if asked.url != path.as_uri() else None)

    def show(report: JobReport) -> Any:
        path.write_text(report_page(report), encoding="utf-8")
        tab.goto(path.as_uri())
        return tab

    yield show
    context.close()
    assert not told, told


@pytest.mark.parametrize("opened", LOOKS, indirect=True, ids=["light", "dark", "phone"])
def test_a_report_is_complete_and_accessible(
    opened: Any, trained: JobReport, pictures: Path, request: pytest.FixtureRequest
) -> None:
    tab = opened(trained)
    for selector in (
        ".chart canvas",
        ".row.group",
        ".answer pre",
        ".phases",
        ".row.event",
        "table.spec",
        ".row.member",
    ):
        tab.locator(selector).first.wait_for()
    expect(tab.get_by_role("heading", name="arithmetic")).to_be_visible()
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(each => each)"
    assert tab.locator(".chart canvas").first.evaluate(drawn)
    tab.locator("summary", has_text="Distributions").scroll_into_view_if_needed()
    tab.locator("figure.distribution canvas").first.wait_for()
    expect(tab.get_by_role("alert")).to_have_count(0)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.screenshot(path=str(pictures / f"report-{request.node.callspec.id}.png"), full_page=True)
    tab.evaluate(AXE.read_text())
    found = tab.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    serious = [(each["id"], each["nodes"][0]["target"]) for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, serious


def test_a_report_carries_the_pictures_of_prompts(opened: Any, staged: Stage) -> None:
    job_id = staged.submit(staged.picture_spec("carried", 1))
    assert staged.coordinator.client.wait(job_id, 120).state is JobState.SUCCEEDED
    known = gather(staged.coordinator.client, job_id, samples=4)
    gone = known.groups[0].samples[0].images[0].sha256
    images = {digest: file for digest, file in known.images.items() if digest != gone}
    tab = opened(known.model_copy(update={"images": images, "missing_images": {gone: "It went away."}}))
    prompt = tab.get_by_role("article").locator("pre.prompt")
    expect(prompt.get_by_role("img")).to_have_count(1)
    tab.wait_for_function("document.querySelector('pre.prompt img').naturalWidth === 1600")
    expect(prompt.get_by_role("note")).to_have_text("It went away.")


def test_a_report_is_zoomed_and_searched(opened: Any, trained: JobReport) -> None:
    tab = opened(trained)
    chart = tab.locator(".chart .u-over").first
    chart.wait_for()
    place = chart.bounding_box()
    tab.mouse.move(place["x"] + 0.3 * place["width"], place["y"] + 20)
    tab.mouse.down()
    tab.mouse.move(place["x"] + 0.7 * place["width"], place["y"] + 20, steps=4)
    tab.mouse.up()
    expect(tab.get_by_role("button", name="steps")).to_be_visible()
    tab.get_by_label("Search metrics").fill("grad_norm")
    expect(tab.get_by_role("img", name="actor/grad_norm")).to_be_visible()
    tab.get_by_role("option").nth(1).click()
    expect(tab.get_by_role("option").nth(1)).to_have_attribute("aria-selected", "true")
    tab.locator(".phases").first.scroll_into_view_if_needed()
    tab.locator("[aria-label='Publications'] button").first.click()
    expect(tab.get_by_text("sends").first).to_be_visible()


def test_texts_of_users_and_models_run_nothing(opened: Any) -> None:
    tab = opened(hostile_contents())
    expect(tab.get_by_text("<script>alert(1)</script>").first).to_be_visible()
    assert tab.locator("main img").count() == 0
    assert tab.evaluate("document.scripts.length") == 2
