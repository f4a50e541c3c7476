"""A user's own algorithm, from a file. What it raises or wrongly returns is told with its place and ends no process."""

import importlib.util
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from millrace.errors import InvalidJob, MillraceError
from millrace.rl.registry.catalogue import Entry, Kind

RETURNS = {
    Kind.ADVANTAGE: "(advantages_bt, returns_bt), both [B, T]",
    Kind.POLICY_LOSS: "(loss_bt, shares_bt): the loss of each token, [B, T], and a mapping of what to report a token",
    Kind.CORRECTION: "(weights_bt, keep_bt, shares_bt): weights [B, T] or None, bool [B, T] and a mapping as a loss's",
}


def is_own(entry: Entry) -> bool:
    return ":" in entry.name


@cache
def module(path: Path) -> ModuleType:
    """The file, run once."""
    spec = importlib.util.spec_from_file_location(f"millrace_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidJob(f"{path} is not a Python file.", "Name your algorithm as file.py:function.")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@contextmanager
def told(entry: Entry) -> Iterator[None]:
    """What a user's own code raises inside becomes InvalidJob with file and line. Millrace's own passes as it is."""
    try:
        yield
    except Exception as error:  # theirs may raise anything, and the trainer outlives it
        if not is_own(entry):
            raise
        module.cache_clear()  # the job may go on with the file fixed
        if isinstance(error, MillraceError):
            raise
        what = f"{_field(entry)}: {entry.function} failed at {_place(error, entry.path.resolve())}: "
        raise InvalidJob(f"{what}{type(error).__name__}: {error}", "fix the file, then submit or resume.") from error


def check_returned(entry: Entry, returned: Any, inputs: Mapping[str, Any]) -> None:
    """Raises InvalidJob where that is not what such a function returns for these `inputs`."""
    shape = inputs["mask_bt"].shape
    match entry.kind, returned:
        case Kind.ADVANTAGE, (advantages, returns):
            right = _fits(advantages, shape) and _fits(returns, shape)
        case Kind.POLICY_LOSS, (loss, shares):
            differentiable = not torch.is_grad_enabled() or not inputs["logprobs_bt"].requires_grad
            right = _fits(loss, shape) and _reported(shares, shape) and (differentiable or loss.requires_grad)
        case Kind.CORRECTION, (weights, keep, shares):
            right = (weights is None or _fits(weights, shape)) and _fits(keep, shape) and keep.dtype == torch.bool
            right = right and _reported(shares, shape)
        case _:
            right = False
    if not right:
        found = f"with a batch of [{shape[0]}, {shape[1]}] it gave {_described(returned)}"
        fix = f"return {RETURNS[entry.kind]}; a loss carries the gradient of logprobs_bt."
        raise InvalidJob(f"{_field(entry)}: {entry.name} returns what cannot be used: {found}.", fix)


def _field(entry: Entry) -> str:
    return f"algorithm.{entry.kind.singular.replace(' ', '_')}.name"


def _place(error: Exception, path: Path) -> str:
    """The deepest line of the user's own file, or else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename == str(path)] or frames
    return f"{theirs[-1].filename}:{theirs[-1].lineno}"


def _fits(value: Any, shape: torch.Size) -> bool:
    """Whether it is [B, T], or the same for all of a row or column."""
    is_matrix = isinstance(value, Tensor) and value.dim() == 2
    return is_matrix and all(size in (1, whole) for size, whole in zip(value.shape, shape, strict=True))


def _reported(shares: Any, shape: torch.Size) -> bool:
    return isinstance(shares, Mapping) and all(
        isinstance(name, str) and isinstance(share, Tensor) and (share.dim() == 0 or _fits(share, shape))
        for name, share in shares.items()
    )


def _described(value: Any) -> str:
    match value:
        case Tensor():
            gradient = " with gradient" if value.requires_grad else ""
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{gradient}"
        case tuple() | list():
            return f"({', '.join(map(_described, value))})"
        case Mapping():
            return "{" + ", ".join(f"{name}: {_described(part)}" for name, part in value.items()) + "}"
    return type(value).__name__
