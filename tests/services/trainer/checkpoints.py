"""Checkpoints without a trainer around them."""

from pathlib import Path

from millrace.ids import JobId, Version
from services.trainer import checkpoint
from services.trainer.backends import Backend


def draft(
    path: Path, backend: Backend, version: int, huggingface_from: Path | None = None, *, copied: bool = True
) -> checkpoint.Draft:
    model = str(huggingface_from) if huggingface_from else None
    about = {"job_id": JobId("job-1"), "version": Version(version), "huggingface_from": model}
    return checkpoint.draft(str(path), backend, **about, copied=copied)


def save(path: Path, backend: Backend, version: int, huggingface_from: Path | None = None) -> None:
    checkpoint.finish(draft(path, backend, version, huggingface_from, copied=False))
