"""Libraries that tests use and that take long to import."""

import importlib
from typing import Any


class Later:
    """A module that is imported when something of it is used: each worker collects each file of tests, and runs a part
    of them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for private names: pytest asks everything in a file for `__test__` and `_mock_name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
