"""A box of a tensor is read without the rest of the tensor."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from millrace.checkpoints.index import read_index
from millrace.errors import InvalidJob
from services.trainer.checkpoints.foreign.files import ChunkReader
from services.trainer.checkpoints.model_files import ModelFiles


class Counted(ChunkReader):
    """Counts the bytes of tensors that are read."""

    count = 0

    def _box(self, tensor, chunk, first, end):  # type: ignore[no-untyped-def]
        found = super()._box(tensor, chunk, first, end)
        self.count += found.untyped_storage().nbytes()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_of_a_box_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(3000 * 40, dtype=torch.float32).reshape(3000, 40).to(dtype)
    dcp.save({"odd": torch.zeros(3, dtype=torch.uint8), "a": whole}, checkpoint_id=tmp_path, no_dist=True)
    reader = Counted(tmp_path, "model.weights")
    found = reader.read(read_index(tmp_path, "model.weights").tensors["a"], (1000, 5), (1010, 9))
    assert torch.equal(found, whole[1000:1010, 5:9])
    assert reader.count <= 10 * 40 * whole.element_size()
    reader.close()


def test_any_strides(tmp_path: Path) -> None:
    """torch.save keeps them, so the numbers of a transposed tensor are in another order in the file."""
    whole = torch.randn(6, 5).t()
    dcp.save({"a": whole}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    with ModelFiles(tmp_path) as files:
        assert torch.equal(files.slice_of("a", (5, 6))[1:3, 2:6], whole[1:3, 2:6])
        assert torch.equal(files.whole("a"), whole)
        assert files.tensor("a").get_dtype() == "F32"
        with pytest.raises(InvalidJob, match=r"a in .* is \(5, 6\), the config asks for \(5, 7\)"):
            files.slice_of("a", (5, 7))
        with pytest.raises(InvalidJob, match="has no tensor b"):
            files.slice_of("b", (1,))


def test_values_that_are_not_there_are_named(tmp_path: Path) -> None:
    dcp.save({"a": torch.randn(6, 5)}, checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    data[:400] = bytes(400)
    (tmp_path / "__0_0.distcp").write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    with ModelFiles(tmp_path) as files, pytest.raises(InvalidJob, match=r"a cannot be read from byte 0 of __0_0"):
        files.whole("a")
