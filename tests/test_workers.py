from pathlib import Path

from tests.conftest import LONG, TOGETHER


def test_the_files_that_are_told_apart_exist() -> None:
    missing = [file for file in {*LONG, *TOGETHER, *TOGETHER.values()} if not (Path(__file__).parent / file).is_file()]
    assert not missing
