"""The page as it is built: it belongs to its sources, its types to REST's models, and its colours can be read."""

import hashlib
import re
import runpy
from pathlib import Path

import pytest

from millrace import report
from services.coordinator.rest.pages import PAGE, STATIC

WEB = Path(__file__).parents[4] / "web"
STYLE = (WEB / "src" / "page.css").read_text()
LARGEST_BUNDLE = 250_000
"""Bytes of the script and the style sheet together."""


def test_the_page_was_built_from_these_sources() -> None:
    """Otherwise run `make web` and commit services/coordinator/rest/static and millrace/report/static."""
    names = [path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted({*names, "package.json", "build.mjs"} - {"src/rest.ts"}):
        digest.update(f"{name}\n".encode() + (WEB / name).read_bytes())
    for folder in (STATIC, report.STATIC):
        assert (folder / "sources.sha256").read_text().strip() == digest.hexdigest()


def declared(types: str) -> set[tuple[str, str]]:
    """Every field of every interface, and every member of every other type, in a TypeScript file."""
    found = {
        (name, part) for name, body in re.findall(r"export type (\w+) = (.*);", types) for part in body.split(" | ")
    }
    for name, body in re.findall(r"export interface (\w+) \{\n(.*?)\n\}", types, re.DOTALL):
        found |= {(name, line.strip()) for line in body.splitlines()}
    return found


def test_the_types_of_the_page_are_those_of_rest() -> None:
    """Otherwise run `python web/rest_types.py > web/src/rest.ts`. The compiler refuses a page that reads a field which
    no model has. A field that the page does not know yet is no mistake."""
    kept = declared((WEB / "src" / "rest.ts").read_text())
    assert len(kept) > 300
    assert kept <= declared(runpy.run_path(str(WEB / "rest_types.py"))["page"]())


def test_the_page_needs_nothing_from_the_internet() -> None:
    files = [PAGE, STATIC / "page.js", STATIC / "page.css"]
    assert sum(path.stat().st_size for path in files) < LARGEST_BUNDLE
    for path in files:
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[\w./-]*", path.read_text()))
        assert not {address for address in addresses if "www.w3.org" not in address}, path
    for line in re.findall(r'(?:src|href)="([^"]+)"', PAGE.read_text()):
        assert line.startswith("data:") or (STATIC / line.removeprefix("/static/")).is_file(), line


COLOURS = {
    name: themes for name, *themes in re.findall(r"--(\w+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", STYLE)
}
"""The page's colours by name, each for the light and for the dark theme."""


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "soft", "water", "good", "bad", "warm"])
def test_text_is_readable_on_every_background(name: str, theme: int) -> None:
    for background in ("paper", "card", "wash"):
        found = sorted(luminance(COLOURS[each][theme]) for each in (name, background))
        assert (found[1] + 0.05) / (found[0] + 0.05) >= 4.5, background
