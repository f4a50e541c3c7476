"""docs/models.md is what docs/models_page.py makes of the tables of architectures."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_is_made() -> None:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "models.md").read_text() == module.page(), "python docs/models_page.py > docs/models.md"
