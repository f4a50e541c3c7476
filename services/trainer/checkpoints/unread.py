"""Accounts for the tensors of a model folder that a backend does not read: by name, and tied ones by value."""

from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from millrace.weights.unread import Unread, other_values
from services.trainer.checkpoints.model_files import ModelFiles

ROWS = 4096
"""Rows of two tensors that are compared at a time."""
log = structlog.get_logger(__name__)


def check_unread(unread: Unread, files: ModelFiles, folder: Path, place: str, *, by_value: bool) -> None:
    """Raises InvalidJob where tensors of `files` with values of their own would be lost; `place` as in `Unread.check`.
    `by_value`: also reads tied tensors, and tells what is left out."""
    unread.check(place)
    for name, source in unread.copies:
        one, other = files.tensor(name), files.tensor(source)
        if tuple(one.get_shape()) != tuple(other.get_shape()) or (by_value and not _equal(one, other)):
            raise other_values(place, name, source)
    if unread.ahead and by_value:
        warning = "tensors that predict several tokens at once are not trained, and left out of what is saved"
        log.warning(warning, folder=str(folder), tensors=len(unread.ahead), first=unread.ahead[0])


def _equal(one: Any, other: Any) -> bool:
    """Whether two safetensors slices of one shape have the same values."""
    rows = one.get_shape()[0] if one.get_shape() else 1
    if not one.get_shape():
        return torch.equal(_values(one, ...), _values(other, ...))
    starts = range(0, rows, ROWS)
    return all(torch.equal(_values(one, slice(at, at + ROWS)), _values(other, slice(at, at + ROWS))) for at in starts)


def _values(stored: Any, index: Any) -> Tensor:
    values: Tensor = stored[index]
    return values.float()
