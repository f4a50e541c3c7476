"""docs/job.md and the names in docs/from-verl.md are what docs/reference.py makes of the code; every field is told."""

import re
from pathlib import Path

from tests.docs.scripts import script

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_that_of_the_models() -> None:
    assert (DOCS / "job.md").read_text() == script("reference").page(), "python docs/reference.py > docs/job.md"


def test_the_names_of_other_trainers_are_those_that_are_understood() -> None:
    page = (DOCS / "from-verl.md").read_text()
    assert page == script("reference").with_names(page), "python docs/reference.py from-verl"
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) > 120


def test_every_field_says_what_it_is() -> None:
    rows = re.findall(r"^\| (`\w+`) .* \| (.*) \|$", (DOCS / "job.md").read_text(), re.MULTILINE)
    assert len(rows) > 80
    assert [name for name, told in rows if not told.strip()] == []
