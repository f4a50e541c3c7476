import re
import tomllib
from pathlib import Path

import pytest

from millrace.spec import parse
from services.coordinator.jobs.control import CHANGEABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
LINKED = (
    *PAGES,
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "presets/README.md",
    "recipes/README.md",
    *(str(path.relative_to(ROOT)) for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.md")),
)
ROOMS = "proto|millrace|services|deploy|demo|docs|examples|tests|presets|recipes|benchmarks|web"
LOOKS_LIKE_A_PATH = re.compile(rf"`((?:{ROOMS})/[\w./-]*)`|\]\(([\w./-]+)\)")


def named_paths(page: str) -> set[str]:
    return {path or link for path, link in LOOKS_LIKE_A_PATH.findall((ROOT / page).read_text())}


@pytest.mark.parametrize("page", PAGES)
def test_each_path_that_a_page_names_exists(page: str) -> None:
    paths = named_paths(page)
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_each_link_of_a_page_leads_somewhere(page: str) -> None:
    dead = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_architecture_page_names_every_folder_of_the_tree() -> None:
    named = named_paths("ARCHITECTURE.md")
    rooms = [p.parent for top in ("millrace/*", "services/*/*") for p in ROOT.glob(f"{top}/__init__.py")]
    folders = {f"{p.relative_to(ROOT)}/" for p in rooms}
    assert {folder for folder in folders if not any(path.startswith(folder) for path in named)} == set()


@pytest.mark.parametrize("page", LINKED)
def test_each_make_target_and_subcommand_that_a_page_names_exists(page: str) -> None:
    from millrace.cli import app

    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    commands = {each.name for each in (*app.registered_commands, *app.registered_groups)}
    assert set(re.findall(r"(?:^|`|; )millrace ([a-z]+)\b", text, re.MULTILINE)) <= commands


@pytest.mark.parametrize("page", LINKED)
def test_each_extra_that_a_page_names_exists(page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'\.\[([\w,-]+)\]'", (ROOT / page).read_text())
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


def test_the_jobs_in_the_readme_are_valid() -> None:
    import yaml

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert parse(yaml.safe_load(block)).name


def test_the_page_on_running_names_each_field_that_a_continued_job_may_change() -> None:
    rows = (ROOT / "docs/running.md").read_text().partition("| the trainer | fields |")[2].splitlines()[2:4]
    loads_anew = {field: number == 1 for number, row in enumerate(rows) for field in re.findall(r"`([^`]+)`", row)}
    assert loads_anew == CHANGEABLE
