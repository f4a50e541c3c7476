"""docs/job.md is what docs/reference.py makes of the models, and tells of each field what it is."""

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def made() -> str:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.page())


def test_the_page_is_that_of_the_models() -> None:
    assert (DOCS / "job.md").read_text() == made(), "python docs/reference.py > docs/job.md"


def test_every_field_says_what_it_is() -> None:
    rows = re.findall(r"^\| (`\w+`) .* \| (.*) \|$", (DOCS / "job.md").read_text(), re.MULTILINE)
    assert len(rows) > 80
    assert [name for name, told in rows if not told.strip()] == []
