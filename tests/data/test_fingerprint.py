"""Content of data files that changed is told from content that did not."""

from pathlib import Path

import pytest

from millrace.data import open_source
from millrace.data.fingerprint import BLOCK, BLOCKS, fingerprint
from millrace.data.row import PromptRow, write_rows


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, BLOCK * BLOCKS])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size: int) -> None:
    file = tmp_path / "rows.jsonl"
    content = bytearray(n * 31 % 251 for n in range(size))
    file.write_bytes(content)
    before = fingerprint([str(file)])
    for place in {0, size // 3, size // 2, size - 1}:
        content[place] ^= 1
        file.write_bytes(content)
        assert fingerprint([str(file)]) != before
        content[place] ^= 1
    file.write_bytes(content)
    assert fingerprint([str(file)]) == before


def test_of_a_large_file_size_and_blocks_count(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def written(size: int, changed: int | None = None) -> str:
        with file.open("wb") as opened:
            opened.truncate(size)
            if changed is not None:
                opened.seek(changed)
                opened.write(b"x")
        return fingerprint([str(file)])

    size = 1 << 30
    same = written(size)
    assert written(size) == same
    others = [written(size + 1), *(written(size, place) for place in (0, (size - BLOCK) * 7 // 15 + 100, size - 1))]
    assert len({same, *others}) == 5


def test_a_source_has_the_fingerprint_of_its_files_in_their_order(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for number, path in enumerate(paths):
        write_rows(path, [PromptRow(0, "sums", str(number), ground_truth="1")])
    source = open_source(paths)
    assert source.fingerprint == fingerprint(paths) == open_source(paths).fingerprint
    assert open_source(paths[::-1]).fingerprint != source.fingerprint
