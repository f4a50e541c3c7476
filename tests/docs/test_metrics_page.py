"""docs/metrics.md is what docs/metrics_page.py makes of the declarations."""

from pathlib import Path

from tests.docs.scripts import script

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_that_of_the_declarations() -> None:
    assert (DOCS / "metrics.md").read_text() == script("metrics_page").page(), (
        "python docs/metrics_page.py > docs/metrics.md"
    )
