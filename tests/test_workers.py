from pathlib import Path

from tests.conftest import BUSY, TOGETHER, WAITING


def test_the_files_that_are_told_apart_exist() -> None:
    named = {*BUSY, *WAITING, *TOGETHER, *TOGETHER.values()}
    assert [path for path in named if not (Path(__file__).parent / path).exists()] == []
