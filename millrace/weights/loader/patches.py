"""What engines' loaders do besides copying, so that watching them sees every copy all the same.

They join tensors before they copy them, and leave copies to thread pools, of which a dispatch mode sees nothing.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


class Joined:
    """Tensors that a loader made by joining others along their first dimension, and of which ones."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        """By storage. The tensors are kept, or others could come to lie there."""

    def add(self, result: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        self._made[result.untyped_storage().data_ptr()] = (result, parts)

    def parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of what `tensor` was joined; itself if it was not."""
        _, parts = self._made.get(tensor.untyped_storage().data_ptr(), (tensor, (tensor,)))
        return parts

    def apart(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The copies from parts that a copy from `source`, of the shape of `target`, amounts to: (target, source) of
        each. None where `source` shows something else than rows of what was joined."""
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
def in_this_thread() -> Iterator[None]:
    """What this thread hands to a thread pool inside is carried out at once, by this thread."""
    with _lock:
        _inline.add(threading.get_ident())
        ThreadPoolExecutor.submit = _submit_or_do  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _lock:
            _inline.discard(threading.get_ident())
            if not _inline:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


def _submit_or_do(
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
