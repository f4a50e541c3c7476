"""Python files are read without running them."""

import ast
import gc
import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.imports import syntax_tree


@pytest.fixture
def threads_switch_in_the_collector() -> Iterator[None]:
    """As in a finalizer that runs Python, other threads run while a tree is made."""

    def wait(phase: str, _: object) -> None:
        if phase == "stop":
            time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(wait)
    gc.set_threshold(50, 1, 1000)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(wait)


@pytest.mark.usefixtures("threads_switch_in_the_collector")
def test_threads_that_parse_at_the_same_time_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ast, "parse", inspect.unwrap(ast.parse))  # without what tests/conftest.py does for pytest
    path = Path(ast.__file__)
    names: list[int] = []

    def parse() -> None:
        for _ in range(5):
            names.append(len(syntax_tree(path).body))

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 20 and len(set(names)) == 1
