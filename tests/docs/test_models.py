"""docs/models.md is what docs/models_page.py makes of the tables of backends and engines, and the tests it names run
what it says."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.rollout.engines.vllm.options import SHOWN_ON_GPUS, SHOWN_RECURRENT
from tests.hybrid_models import KINDS as HYBRIDS
from tests.image_models import KINDS as WITH_IMAGES
from tests.services.trainer.backends.megatron.conftest import EVERY, KINDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_is_made(made: ModuleType) -> None:
    assert (DOCS / "models.md").read_text() == made.page(), "python docs/models_page.py > docs/models.md"


def test_a_test_runs_each_family_where_the_table_says_so(made: ModuleType) -> None:
    """The tests of trainers and engines go over these lists."""
    run_by = {"test_recurrent.py": HYBRIDS, "test_hybrid.py": HYBRIDS, "test_vllm.py": KINDS, "test_parity.py": EVERY}
    run_by |= {"test_sweep.py": made.RIGHT, "test_images.py": WITH_IMAGES, "test_image_prompts.py": WITH_IMAGES}
    for family in made.FAMILIES:
        for where, path in family.tests.items():
            file = DOCS.parent / path
            assert file.is_file() and set(family.types) <= set(run_by[file.name]), (family.title, where)


def test_recurrent_models_are_said_to_run_only_where_they_do(made: ModuleType) -> None:
    rows = [family for family in made.FAMILIES if made.RECURRENT.issuperset(family.types)]
    assert {kind for family in rows for kind in family.types} == set(SHOWN_RECURRENT) == set(HYBRIDS)
    for family in rows:
        on_gpus = "see below" if set(SHOWN_ON_GPUS) & set(family.types) else "refused"
        assert family.row().endswith(f"| yes | yes | yes | refused | {on_gpus} |")
