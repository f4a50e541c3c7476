"""From an algorithm's name to its function: built in, or a user's own `file.py:function`."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.errors import InvalidJob
from millrace.rl.catalogue import Entry, Kind, find


def call(kind: Kind, name: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """What the algorithm returns for those of `inputs` that it takes and the checked `options`. Raises InvalidJob."""
    entry = find(kind, name)
    given = {key: value for key, value in inputs.items() if value is not None and key in entry.inputs}
    missing = entry.required_inputs - given.keys()
    if missing:
        mend = "Give the job a critic." if "values_bt" in missing else "Pass it."
        raise InvalidJob(f"The {kind.singular} {name!r} needs {', '.join(sorted(missing))}.", mend)
    return function_of(entry)(**given, **entry.check(options))


def function_of(entry: Entry) -> Callable[..., Any]:
    """The function itself."""
    return getattr(module_of(entry), entry.function)


def module_of(entry: Entry) -> ModuleType:
    """The module that defines it; runs a user's file on first use."""
    if ":" in entry.name:
        return _user_module(entry.path.resolve())
    return importlib.import_module(f"millrace.rl.{entry.kind.value}.{entry.name}")


@cache
def _user_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"millrace_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidJob(f"{path} is not a Python file.", "Name your algorithm as file.py:function.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
