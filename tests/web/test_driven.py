"""What people do with the page, done in headless Chromium."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from millrace.rest import JobState
from millrace.telemetry.logs import TAIL
from tests.web.stage import Stage

pytestmark = [pytest.mark.web, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(staged: Stage) -> list[str]:
    """Two jobs that have succeeded, with different learning rates."""
    ids = [
        staged.submit(
            staged.spec(f"rate-{number}", 12, trainer={"token_budget": 2048, "optimizer": {"lr": number * 1e-6}})
        )
        for number in (1, 2)
    ]
    for job_id in ids:
        assert staged.coordinator.client.wait(job_id, 120).state is JobState.SUCCEEDED
    return ids


def expect(found: Any) -> Any:
    """Playwright's assertion, which waits."""
    from playwright.sync_api import expect as playwright_expect

    playwright_expect.set_options(timeout=60_000)
    return playwright_expect(found)


def test_a_job_is_submitted_from_the_form_and_followed_live(page: Any, staged: Stage) -> None:
    spec = staged.spec("from the form", 40)
    page.goto("/#/submit")
    expect(page.get_by_role("list", name="Mistakes")).to_contain_text("is missing")
    page.get_by_label("name *").first.fill(spec["name"])
    page.get_by_label("output").first.fill(spec["output"].replace(" ", "-"))
    page.get_by_label("model.path *").fill(spec["model"]["path"])
    page.get_by_label("data.files").fill(spec["data"]["files"][0])
    page.get_by_label("reward.function").fill("exakt")
    expect(page.get_by_role("list", name="Mistakes")).to_contain_text("exakt")
    page.get_by_label("reward.function").fill("exact")
    for field, value in (("schedule.steps", 40), ("schedule.prompts_per_step", 4), ("rollout.samples_per_prompt", 4)):
        page.get_by_label(field).fill(str(value))
    page.get_by_label("rollout.max_response_tokens").fill("128")
    expect(page.get_by_role("status")).to_have_text("valid")
    page.get_by_role("button", name="submit").click()
    expect(page.get_by_role("heading", name="from the form")).to_be_visible()
    expect(page.locator(".figure.steps b")).to_have_text(re.compile(r"^[3-9] / 40"))
    expect(page.get_by_role("img", name="critic/score:")).to_be_visible()
    page.get_by_role("button", name="cancel", exact=True).click()
    page.get_by_role("button", name="cancel the job").click()
    expect(page.locator(".head .state")).to_have_text("cancelled")


def test_a_cancelled_job_is_resumed_with_a_change(page: Any, staged: Stage) -> None:
    job_id = staged.submit(staged.spec("resumed", 500))
    page.goto(f"/#/job/{job_id}")
    expect(page.locator(".figure.steps b")).to_have_text(re.compile(r"^[2-9] / 500"))
    page.get_by_role("button", name="pause").click()
    expect(page.locator(".head .state")).to_have_text("paused")
    page.get_by_role("button", name="resume").click()
    expect(page.locator(".head .state")).to_have_text("running")
    staged.coordinator.client.cancel(job_id)
    expect(page.locator(".head .state")).to_have_text("cancelled")
    page.get_by_role("button", name="resume…").click()
    changes = page.get_by_label("Changes of its spec")
    changes.fill("schedule.steps")
    page.get_by_role("dialog").get_by_role("button", name="resume").click()
    expect(page.get_by_role("alert")).to_contain_text("Fix:")
    steps = staged.coordinator.client.job(job_id).step + 5
    changes.fill(f"schedule.steps: {steps}")
    page.get_by_role("dialog").get_by_role("button", name="resume").click()
    expect(page.locator(".head .state")).to_have_text("succeeded")
    assert staged.coordinator.client.job(job_id).steps == steps
    page.get_by_role("link", name="events").click()  # the stream that had ended goes on
    page.get_by_label("Search events").fill("queued again")
    expect(page.get_by_text("is queued again")).to_be_visible()


def test_two_jobs_are_compared(page: Any, trained: list[str]) -> None:
    page.goto("/#/jobs")
    page.get_by_label("Search jobs").fill("rate-")
    for number in (1, 2):
        page.get_by_label(f"Compare rate-{number}").check()
    page.get_by_role("button", name="compare 2").click()
    expect(page.get_by_role("row", name=re.compile("trainer.optimizer.lr"))).to_contain_text("0.000002")
    chart = page.get_by_role("img", name="critic/score: rate-")
    expect(chart.locator("canvas")).to_be_visible()
    page.get_by_label("only what differs").uncheck()
    expect(page.get_by_role("row", name=re.compile("schedule.steps"))).to_be_visible()


def test_metrics_are_searched_smoothed_and_zoomed(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}")
    page.get_by_label("Search metrics").fill("grad_norm")
    expect(page.locator("figure.chart")).to_have_count(1)  # until then the main metrics are shown
    chart = page.get_by_role("img", name="actor/grad_norm:")
    expect(chart.locator("canvas")).to_be_visible()
    page.get_by_label("smoothing").fill("0.8")
    page.get_by_label("log scale").check()
    for axis in ("tokens", "time", "step"):
        button = page.get_by_role("button", name=axis, exact=True)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")  # the chart of this axis is there as well
        expect(chart.locator("canvas")).to_be_visible()
    page.locator("figure.chart").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".told")).to_contain_text("at step")
    place = chart.bounding_box()
    page.mouse.move(place["x"] + 0.5 * place["width"], place["y"] + 50)
    page.mouse.down()
    page.mouse.move(place["x"] + 0.9 * place["width"], place["y"] + 50, steps=5)
    page.mouse.up()
    page.get_by_role("button", name=re.compile(r"steps \d+ to \d+")).click()


def test_distributions_are_looked_at_step_by_step(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}")
    shown = page.get_by_role("img", name=re.compile(r"Distribution of response_length in step 12: \d+ of 16 are"))
    expect(shown).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Distribution of"))).to_have_count(5)
    page.locator("figure.distribution").filter(has_text="response_length").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("img", name="Distribution of response_length in step 11")).to_be_visible()
    page.get_by_label("Search metrics").fill("grad_norm")
    expect(page.locator("figure.distribution")).to_have_count(0)


def test_a_group_and_its_tokens_are_opened(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}/samples")
    page.get_by_role("button", name="train").click()
    page.get_by_label("step", exact=True).fill("7")
    rows = page.get_by_role("option")
    expect(rows).to_have_count(4)
    rows.nth(2).click()
    group = page.get_by_role("article")
    expect(group).to_contain_text("What is")
    expect(group.get_by_role("region")).to_have_count(4)
    group.get_by_role("button", name="tokens").click()
    tokens = group.locator("pre.tokens").first.locator("span")
    expect(tokens.first).to_have_attribute("title", re.compile("nats"))
    assert "sum of both" in "".join(tokens.all_text_contents()) or "<call>" in "".join(tokens.all_text_contents())
    expect(group.locator(".facts").first).to_contain_text(re.compile(r"advantage [+−]"))
    expect(tokens.first).to_have_attribute("title", re.compile(r"trainer -.* \([+−].*\) · advantage [+−]"))
    for way in ("engine − trainer", "advantage", "version", "sampled"):
        button = group.get_by_role("button", name=way)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        if way == "engine − trainer":
            expect(group.locator("pre.tokens span[style]").first).to_be_visible()
            expect(group.locator(".key")).to_contain_text("+0.5 nats or more")
    page.get_by_role("button", name="keep beside").click()
    page.get_by_label("step", exact=True).fill("8")
    expect(page.get_by_role("article")).to_have_count(2)
    page.get_by_label("Search prompts and answers").fill("no such text")
    expect(page.get_by_text("No group matches.")).to_be_visible()


@pytest.fixture(scope="module")
def with_pictures(staged: Stage) -> str:
    """A job with two images in each prompt."""
    job_id = staged.submit(staged.picture_spec("shown", 2))
    assert staged.coordinator.client.wait(job_id, 120).state is JobState.SUCCEEDED
    return job_id


@pytest.mark.parametrize("page", [(1280, 860, "light"), (390, 800, "dark")], indirect=True, ids=["desktop", "phone"])
def test_pictures_stand_in_their_prompt(page: Any, with_pictures: str, pictures: Path) -> None:
    page.goto(f"/#/job/{with_pictures}/samples/2")
    page.get_by_role("option").first.click()
    prompt = page.get_by_role("article").locator("pre.prompt")
    images = prompt.get_by_role("img")
    expect(images).to_have_count(2)
    for number, width in enumerate((90, 1600)):
        page.wait_for_function(
            f"i => document.querySelectorAll('pre.prompt img')[i].naturalWidth === {width}", arg=number
        )
        assert images.nth(number).bounding_box()["width"] > 80
    order = prompt.evaluate("p => [...p.childNodes].map(n => n.nodeType === 3 ? n.data.trim() : n.className)")
    assert order == ["user: Is", "picture", "darker than", "picture", "? Say it in a sentence."]
    expect(prompt).to_contain_text("PNG · 90 × 60")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a picture is wider than the window"
    page.screenshot(path=str(pictures / f"pictures-{page.viewport_size['width']}.png"))


def test_a_picture_whose_file_is_gone_says_so(browser: Any, staged: Stage, with_pictures: str) -> None:
    """The refused request is an error of the console, so that is not looked at."""
    context = browser.new_context(base_url=staged.url)
    context.set_default_timeout(60_000)
    page = context.new_page()
    away = staged.folder / "shown pictures" / "wide.jpeg"
    kept = away.read_bytes()
    Image.new("L", (4, 4)).save(away)
    try:
        page.goto(f"/#/job/{with_pictures}/samples/1")
        page.get_by_role("option").first.click()
        prompt = page.get_by_role("article").locator("pre.prompt")
        expect(prompt.get_by_role("img")).to_have_count(1)
        expect(prompt.get_by_role("note")).to_contain_text("the data has another image now")
    finally:
        away.write_bytes(kept)
        context.close()


def test_rows_of_samples_begin_with_the_question_and_tell_right_from_wrong(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}/samples/1")
    page.get_by_role("button", name="train").click()
    rows = page.get_by_role("option")
    expect(rows).to_have_count(4)
    assert all(text.startswith("What is") for text in rows.locator(".what b").all_text_contents())
    told = [float(text) for text in rows.locator(".number b").all_text_contents()]
    empty = [row.locator(".dot.zero").count() for row in rows.all()]
    assert empty == [round(4 * (1 - mean)) for mean in told]
    assert max(empty) > 0, "no group of step 1 has a wrong answer"


def test_compared_jobs_tell_their_own_newest_values(page: Any, staged: Stage, trained: list[str]) -> None:
    short = staged.submit(staged.spec("short", 5))
    assert staged.coordinator.client.wait(short, 120).state is JobState.SUCCEEDED
    page.goto(f"/#/compare/{trained[0]},{short}")
    chart = page.locator("figure.chart").filter(has_text="actor/grad_norm")
    expect(chart.locator(".told")).to_have_text(re.compile(r"rate-1 \d.* · short \d"))
    title = chart.locator("figcaption b")
    assert title.evaluate("e => e.scrollWidth <= e.clientWidth"), "the title is cut"


def test_a_checkpoint_is_marked_on_the_curves(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}")
    page.get_by_label("Search metrics").fill("grad_norm")
    expect(page.locator("figure.chart")).to_have_count(1)
    expect(page.get_by_role("img", name="actor/grad_norm:").locator("canvas")).to_be_visible()
    page.locator("figure.chart").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".told")).to_contain_text(re.compile(r"at step 10: .*checkpoint"))


def test_metrics_and_samples_are_saved_as_files(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}")
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    head, *rows = saved.value.path().read_text().splitlines()
    assert head.startswith("step,") and "actor/grad_norm" in head.split(",")
    assert [row.split(",")[0] for row in rows] == [str(step) for step in range(13)]
    page.goto(f"/#/job/{trained[0]}/samples/7")
    expect(page.get_by_role("option").first).to_be_visible()
    with page.expect_download() as saved:
        page.get_by_role("button", name="JSONL").click()
    groups = [json.loads(line) for line in saved.value.path().read_text().splitlines()]
    assert groups and all(group["step"] == 7 for group in groups)


def test_printing_draws_every_open_chart(page: Any, trained: list[str]) -> None:
    page.set_viewport_size({"width": 900, "height": 300})
    page.goto(f"/#/job/{trained[0]}")
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert page.locator("details[open] .chart.waiting").count() > 0, "all charts are in view already"
    waiting = "document.querySelectorAll('details[open] .chart.waiting').length"
    page.evaluate(f"() => {{ window.printed = new Promise((done) => {{ window.print = () => done({waiting}) }}) }}")
    page.get_by_role("button", name="print").click()
    assert page.evaluate("window.printed") == 0


def test_a_coordinator_that_does_not_answer_is_told(page: Any, trained: list[str]) -> None:
    page.goto("/#/jobs")
    expect(page.get_by_role("listitem").first).to_be_visible()
    page.evaluate("() => { window.fetch = async () => { throw new TypeError('Failed to fetch'); } }")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    expect(page.get_by_role("listitem").first).to_be_visible()


def test_the_timeline_of_a_step(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}/timeline/5")
    canvas = page.locator(".lanes canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"Timeline of [4-9] lanes.*Idle: .*trainer"))
    expect(page.get_by_role("region", name="Diagnosis")).to_contain_text("each")
    place = canvas.bounding_box()
    for share in range(20, 100, 2):  # until the pointer is over a span
        page.mouse.move(place["x"] + place["width"] * share / 100, place["y"] + 30)
        if page.locator(".hint").count():
            break
    page.mouse.down()
    page.mouse.up()
    expect(page.get_by_role("region", name="Trace")).to_contain_text("trace")
    page.get_by_role("button", name="Later").click()
    expect(page.get_by_label("to", exact=True)).to_have_value("6")
    page.set_viewport_size({"width": 700, "height": 500})  # sizes change while it is left: no error in the console
    page.get_by_role("link", name="samples", exact=True).click()
    expect(page.get_by_role("option").first).to_be_visible()


def test_records_events_and_spec_of_a_job(page: Any, trained: list[str]) -> None:
    page.goto(f"/#/job/{trained[0]}/records")
    expect(page.get_by_role("region", name="Ledger")).to_contain_text("48 trained")
    publications = page.get_by_role("region", name="Publications", exact=True)
    publications.get_by_role("button").first.click()
    expect(publications).to_contain_text("sends")
    page.get_by_role("link", name="events").click()
    page.get_by_label("Search events").fill("checkpoint")
    expect(page.get_by_role("listitem").first).to_contain_text("checkpoint")
    page.get_by_role("link", name="spec").click()
    expect(page.get_by_role("row", name=re.compile("schedule.steps"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("publication.path"))).to_have_count(0)
    page.get_by_role("button", name="all").click()
    expect(page.get_by_role("row", name=re.compile("publication.path"))).to_be_visible()


def test_what_a_member_uses_and_logs_is_looked_at(page: Any, staged: Stage) -> None:
    TAIL._keep(None, "info", {"timestamp": "2026-01-02T03:04:05Z", "level": "info", "event": "lease <b>taken</b>"})
    replica = staged.replica()
    page.goto("/#/fleet")
    row = page.locator(".row.member", has_text=replica.id)
    expect(row.locator(".used")).to_contain_text("75 %")
    row.get_by_role("button", name="details…").click()
    details = page.get_by_role("dialog", name=replica.id)
    expect(details).to_contain_text("engine cache 40 % in use")
    expect(details.get_by_role("row", name="there 1")).to_contain_text("350 W")
    expect(details.get_by_role("log")).to_contain_text("03:04:05 INFO lease <b>taken</b>")
    page.keyboard.press("Escape")
    expect(details).to_have_count(0)


def test_a_replica_is_drained(page: Any, staged: Stage) -> None:
    member = staged.replica().id
    page.goto("/#/fleet")
    row = page.get_by_role("listitem").filter(has_text=member)
    row.get_by_role("button", name="drain…").click()
    page.get_by_role("button", name="drain it").click()
    expect(row).to_contain_text(re.compile("draining|left"))
    expect(row.get_by_role("button", name="drain…")).to_have_count(0)


def test_the_theme_is_chosen(page: Any) -> None:
    page.goto("/#/fleet")
    page.get_by_role("button", name=re.compile("Colours: system")).click()
    page.get_by_role("button", name=re.compile("Colours: light")).click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
