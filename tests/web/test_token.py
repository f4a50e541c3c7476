"""A coordinator that asks for a token: the page asks the person once."""

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.client import Client
from millrace.rest import JobState
from tests.web.stage import Stage, stage
from tests.web.test_driven import expect

pytestmark = [pytest.mark.web, pytest.mark.timeout(300)]
TOKEN = "the-token-of-this-test"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    environment = {"MILLRACE_TOKEN": TOKEN, "MILLRACE_TOKEN_FILE": ""}
    with stage(tmp_path_factory.mktemp("closed"), environment) as made:
        yield made


@pytest.fixture
def tab(browser: Any, closed: Stage) -> Iterator[Any]:
    """The page; a refused request is an error of the console, so those are not looked at."""
    context = browser.new_context(base_url=closed.url)
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()


def test_a_wrong_token_is_asked_for_again(tab: Any) -> None:
    tab.goto("/#/fleet")
    dialog = tab.get_by_role("dialog")
    for token in ("wrong", TOKEN):
        dialog.get_by_label("MILLRACE_TOKEN").fill(token)
        dialog.get_by_role("button", name="Enter").click()
    expect(tab.get_by_text("No trainers or replicas are connected.")).to_be_visible()
    expect(dialog).to_have_count(0)
    tab.reload()
    expect(tab.get_by_text("No trainers or replicas are connected.")).to_be_visible()


def test_who_enters_no_token_is_not_asked_again(tab: Any) -> None:
    tab.goto("/#/jobs")
    expect(tab.get_by_role("dialog")).to_be_visible()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("alert")).to_contain_text("the token is missing or wrong")
    tab.get_by_role("link", name="Fleet").click()
    expect(tab.get_by_role("alert")).to_contain_text("the token is missing or wrong")
    expect(tab.get_by_role("dialog")).to_have_count(0)


def test_pictures_are_asked_for_with_the_token(tab: Any, closed: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", TOKEN)  # of the members
    closed.trainer()
    closed.replica()
    with Client(closed.url, TOKEN) as client:
        job_id = client.submit(closed.picture_spec("shown", 1)).id
        assert client.wait(job_id, 120).state is JobState.SUCCEEDED
    tab.goto(f"/#/job/{job_id}/samples")
    tab.get_by_role("dialog").get_by_label("MILLRACE_TOKEN").fill(TOKEN)
    tab.get_by_role("dialog").get_by_role("button", name="Enter").click()
    tab.get_by_role("option").first.click()
    tab.wait_for_function(
        "[...document.querySelectorAll('pre.prompt img')].map(i => i.naturalWidth).join() === '90,1600'"
    )
