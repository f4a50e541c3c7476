"""From an algorithm's name to its function: built in, or a user's own `file.py:function`."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from millrace.errors import InvalidJob
from millrace.rl.registry import own
from millrace.rl.registry.catalogue import Entry, Kind, find


def load(chosen: Iterable[tuple[Kind, str]]) -> None:
    """Loads these algorithms, users' own files anew. Raises InvalidJob."""
    own.module.cache_clear()
    for kind, name in chosen:
        function_of(find(kind, name))


def call(kind: Kind, name: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """What the algorithm returns for those of `inputs` that it takes and the checked `options`. Raises InvalidJob, also
    for whatever a user's own raises."""
    entry = find(kind, name)
    given = {key: value for key, value in inputs.items() if value is not None and key in entry.inputs}
    missing = entry.required_inputs - given.keys()
    if missing:
        fix = "Give the job a critic." if "values_bt" in missing else "Pass it."
        raise InvalidJob(f"The {kind.singular} {name!r} needs {', '.join(sorted(missing))}.", fix)
    function, checked = function_of(entry), entry.check(options)
    with own.told(entry):
        returned = function(**given, **checked)
        if own.is_own(entry):
            own.check_returned(entry, returned, inputs)
        return returned


def function_of(entry: Entry) -> Callable[..., Any]:
    """The function itself."""
    with own.told(entry):
        return getattr(module_of(entry), entry.function)


def module_of(entry: Entry) -> ModuleType:
    """The module that defines it; runs a user's file on first use."""
    if own.is_own(entry):
        with own.told(entry):
            return own.module(entry.path.resolve())
    return importlib.import_module(f"millrace.rl.{entry.kind.value}.{entry.name}")
