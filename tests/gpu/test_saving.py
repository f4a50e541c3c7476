"""The state of a GPU comes through pinned memory into copies and files with the same bytes."""

from pathlib import Path

import pytest

from services.trainer.checkpoints import copying
from tests.services.trainer.checkpoints.tensors import assert_copied_and_written


@pytest.mark.parametrize("piece_bytes", [8, 64, 32 << 20])
def test_what_a_gpu_holds_is_copied_and_written(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", piece_bytes)
    assert_copied_and_written("cuda", tmp_path / "bytes")
