"""Libraries that tests use and that take long to import."""

import importlib
from typing import Any


class Later:
    """A module that is imported when something of it is used: each worker collects each file of tests, and runs a part
    of them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
