"""Copies and files have the bytes of the tensors, however they are cut into pieces; the disk is told before the end."""

import os
from pathlib import Path

import pytest
import torch

from services.trainer.checkpoints import copying
from services.trainer.checkpoints.copying import write_through
from tests.services.trainer.checkpoints.tensors import assert_copied_and_written


@pytest.mark.parametrize("piece_bytes", [8, 64, 1 << 20])
def test_copies_and_files_have_the_bytes_of_the_tensors(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(copying, "UNSYNCED_BYTES", 100)
    assert_copied_and_written("cpu", tmp_path / "bytes")


def test_the_disk_takes_the_first_pieces_while_the_last_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def fdatasync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(copying, "PIECE_BYTES", 64)
    monkeypatch.setattr(copying, "UNSYNCED_BYTES", 256)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with (tmp_path / "bytes").open("wb") as file:
        write_through(file, [torch.zeros(1024, dtype=torch.uint8)])
    assert len(sizes) == 4 and sizes[0] >= 256 and max(sizes) <= 1024


def test_a_disk_that_fails_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fdatasync(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(copying, "UNSYNCED_BYTES", 256)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with (tmp_path / "bytes").open("wb") as file, pytest.raises(OSError, match="Input/output"):
        write_through(file, [torch.zeros(1024, dtype=torch.uint8)])
