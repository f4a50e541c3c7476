"""From an algorithm's name to its function: built in, or a user's own `file.py:function`."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from millrace.errors import InvalidJob
from services.trainer.algorithms import user_functions
from millrace.rl.registry.catalogue import AlgorithmEntry, AlgorithmKind, find


def load_algorithms(chosen: Iterable[tuple[AlgorithmKind, str]]) -> None:
    """Imports these algorithms, so that later calls cannot fail at it. Users' files are read again.

    Raises InvalidJob.
    """
    user_functions.load_file.cache_clear()
    for kind, name in chosen:
        function_of(find(kind, name))


def call_algorithm(kind: AlgorithmKind, name: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Calls the algorithm with those of `inputs` that it takes and with the checked `options`; gives what it returns.

    Raises InvalidJob where an input or option is missing or wrong, and for whatever a user's function raises.
    """
    entry = find(kind, name)
    given = {key: value for key, value in inputs.items() if value is not None and key in entry.inputs}
    missing = entry.required_inputs - given.keys()
    if missing:
        fix = "Give the job a critic." if "values_bt" in missing else "Pass it."
        raise InvalidJob(f"The {kind.singular} {name!r} needs {', '.join(sorted(missing))}.", fix)
    function, checked = function_of(entry), entry.check(options)
    with user_functions.errors_with_place(entry):
        returned = function(**given, **checked)
        if entry.is_user_defined:
            user_functions.check_returned(entry, returned, inputs)
        return returned


def function_of(entry: AlgorithmEntry) -> Callable[..., Any]:
    """The function that implements `entry`. Raises InvalidJob where a user's file fails."""
    with user_functions.errors_with_place(entry):
        function: Callable[..., Any] = getattr(module_of(entry), entry.function)
        return function


def module_of(entry: AlgorithmEntry) -> ModuleType:
    """The module that defines `entry`; executes a user's file on first use. Raises InvalidJob where that fails."""
    if entry.is_user_defined:
        with user_functions.errors_with_place(entry):
            return user_functions.load_file(entry.path.resolve())
    return importlib.import_module(f"millrace.rl.{entry.kind.value}.{entry.name}")
