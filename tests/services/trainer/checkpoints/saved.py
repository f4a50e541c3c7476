"""Checkpoints without a trainer around them."""

from pathlib import Path

from millrace.ids import JobId, Version
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.huggingface import GatheredAdapter
from services.trainer.protocol.adapter import Adapter
from services.trainer.protocol.backend import Backend


def prepare(
    path: Path, backend: Backend, version: int, huggingface_from: Path | None = None, *, copied: bool = True
) -> checkpoint.PendingCheckpoint:
    about = {"job_id": JobId("job-1"), "version": Version(version), "huggingface": huggingface_from is not None}
    return checkpoint.copy_for_saving(str(path), backend, **about, model=str(huggingface_from or ""), copied=copied)


def save(path: Path, backend: Backend, version: int, huggingface_from: Path | None = None) -> None:
    checkpoint.write_now(prepare(path, backend, version, huggingface_from, copied=False))


def write_adapter(folder: Path, adapter: Adapter, model: Path) -> None:
    """A collective; the folder is there on rank 0."""
    if (gathered := GatheredAdapter.gather(adapter, str(model))) is not None:
        gathered.write(folder)


def assert_same_files(folder: Path, other: Path) -> None:
    files, others = ({path.name: path for path in there.iterdir()} for there in (folder, other))
    assert files.keys() == others.keys()
    assert all(files[name].read_bytes() == others[name].read_bytes() for name in files)
