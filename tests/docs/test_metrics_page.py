"""docs/metrics.md is what docs/metrics_page.py makes of the declarations."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_that_of_the_declarations() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", DOCS / "metrics_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "metrics.md").read_text() == module.page(), "python docs/metrics_page.py > docs/metrics.md"
