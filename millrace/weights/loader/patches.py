"""Help for dispatch modes, so that they see every copy of an engine's loader.

Loaders concatenate tensors before they copy them, and hand copies to thread pools, which a dispatch mode does not see.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


class Concatenations:
    """Tensors that a loader made by concatenating others along their first dimension, with their parts."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        """Keyed by storage pointer. The tensors are kept so that the allocator cannot reuse the address."""

    def add(self, result: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        self._made[result.untyped_storage().data_ptr()] = (result, parts)

    def parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of `tensor`; the tensor itself if it was not concatenated."""
        _, parts = self._made.get(tensor.untyped_storage().data_ptr(), (tensor, (tensor,)))
        return parts

    def split_copy(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Splits a copy from `source` to `target`, of the same shape, into one copy for each part: (target, source) of
        each. None if `source` is not made of whole rows of a concatenation."""
        result, parts = self._made.get(source.untyped_storage().data_ptr(), (source, ()))
        if not parts:
            return [(target, source)]
        row = result.stride(0)
        first, within = divmod(int(source.storage_offset()), row)
        if within or source.stride() != result.stride() or source.shape[1:] != result.shape[1:]:
            return None
        copies, start = [], 0
        for part in parts:
            begin, end = max(first, start), min(first + len(source), start + len(part))
            if begin < end:
                rows = part.narrow(0, begin - start, end - begin)
                copies.append((target.narrow(0, begin - first, end - begin), rows))
            start += len(part)
        return copies


_inline: set[int] = set()
_lock = threading.Lock()
_submit = ThreadPoolExecutor.submit


@contextmanager
def pools_run_inline() -> Iterator[None]:
    """Inside, what this thread submits to a thread pool runs at once in this thread."""
    with _lock:
        _inline.add(threading.get_ident())
        ThreadPoolExecutor.submit = _submit_or_run  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _lock:
            _inline.discard(threading.get_ident())
            if not _inline:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


def _submit_or_run(
    pool: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any, **named: Any
) -> Future[Any]:
    if threading.get_ident() not in _inline:
        return _submit(pool, function, *arguments, **named)
    done: Future[Any] = Future()
    try:
        done.set_result(function(*arguments, **named))
    except Exception as error:
        done.set_exception(error)
    return done
