"""From a reward's name to the function that scores."""

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.errors import refused
from millrace.extras import how_to_install
from millrace.rewards.locate import NotLocated, Target, definition, functions, parse, parsed, source_file
from millrace.rewards.signature import Signature

ComputeScore = Callable[..., Any]
"""Called with data_source, solution_str, ground_truth and extra_info by keyword; returns a number or {"score": ...}."""

BUILT_IN = {
    "exact": "millrace.rewards.exact",
    "format": "millrace.rewards.format",
    "math": "millrace.rewards.math",
    "reasoning_gym": "millrace.rewards.reasoning_gym",
    "regex": "millrace.rewards.regex",
}
"""Name to module; each has a `compute_score` whose keyword-only parameters are its options. One whose options can be
wrong in ways that their names do not tell has a `check_options` too (raises ValueError) and imports nothing heavy."""

FIELD = "reward.function"
OPTIONS_FIELD = "reward.options"
WANTED = "compute_score(data_source, solution_str, ground_truth, extra_info=None, **options)"


def choose(name: str, *, procedural: bool, style: str = "rule") -> str:
    """Settles `auto`: reasoning_gym for a procedural source, math for rows of style `rule`. Other names stay.

    Raises InvalidJob where a row's `reward_model.style` has no reward of its own.
    """
    if name != "auto":
        return name
    if procedural:
        return "reasoning_gym"
    if style == "rule":
        return "math"
    raise refused(
        FIELD,
        name,
        f"the data asks for rewards of style {style!r} and only `rule` has one of its own",
        f"name a reward: {', '.join(BUILT_IN)}, or your own as file.py:function.",
    )


def check(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Looks whether `load` can work, without running the user's code: the file is found and parsed, the function is
    there and takes the four arguments and `options`. Raises InvalidJob."""
    options = options or {}
    try:
        target = _target(name)
        path = source_file(target)
        function = None if path is None else definition(path, target.function)
    except NotLocated as error:
        raise refused(FIELD, name, error.reason, error.fix) from error
    if function is not None:
        _fits(name, Signature.of_source(function), options)
    if name in BUILT_IN and path is not None and "check_options" in functions(parsed(path)):
        _check_built_in(importlib.import_module(BUILT_IN[name]), options)


def load(name: str, options: Mapping[str, Any] | None = None) -> ComputeScore:
    """Imports the function and binds `options`. An `async def` is run to its end by an event loop that stays.

    Call the result with keywords, outside any event loop. Raises InvalidJob for a missing file, module, function or
    dependency, a wrong signature or wrong options. Anything else that the user's module raises while it is imported
    comes through as it is.
    """
    options = dict(options or {})
    try:
        target = _target(name)
        path = source_file(target)
    except NotLocated as error:
        raise refused(FIELD, name, error.reason, error.fix) from error
    module = _import(name, target, path)
    function = getattr(module, target.function, None)
    if not callable(function):
        what = "no" if function is None else f"a {type(function).__name__} instead of a"
        raise refused(FIELD, name, f"{target.place} has {what} function {target.function}", "name a function there.")
    try:
        signature = Signature.of_callable(function)
    except (ValueError, TypeError):
        signature = Signature(frozenset(), frozenset(), open=True)
    _fits(name, signature, options)
    if name in BUILT_IN and hasattr(module, "check_options"):
        _check_built_in(module, options)
    bound = functools.partial(function, **options) if options else function
    return bound if name in BUILT_IN else _to_the_end(bound)


def _target(name: str) -> Target:
    if name in BUILT_IN:
        return Target(BUILT_IN[name], "compute_score")
    if close := difflib.get_close_matches(name, BUILT_IN, n=1):
        raise NotLocated("there is no such reward", f"did you mean `{close[0]}`?")
    return parse(name)


def _import(name: str, target: Target, path: Path | None) -> ModuleType:
    try:
        if target.is_file and path is not None:
            return _import_file(path.resolve())
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(target.place)
    except (ImportError, SyntaxError) as error:
        what = f"importing it failed: {type(error).__name__}: {error}"
        fix = "install what it imports beside the rollout replica, or fix the file."
        if name in BUILT_IN:
            fix = f"install the scorers beside the rollout replica: {how_to_install('scoring')}."
        raise refused(FIELD, name, what, fix) from error


def _import_file(path: Path) -> ModuleType:
    """Imports a file under a name of its own. Its folder joins the search path, last, so that it finds its siblings."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_name = f"millrace_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _fits(name: str, signature: Signature, options: Mapping[str, Any]) -> None:
    if reason := signature.misfit():
        raise refused(FIELD, name, reason, f"define it as {WANTED}.")
    if reason := signature.misfit_of_options(options):
        fix = f"it takes {', '.join(sorted(signature.named)) or 'nothing by keyword'}."
        raise refused(OPTIONS_FIELD, dict(options), f"{name}: {reason}", fix)
    if unfilled := signature.unfilled(options):
        needed = ", ".join(unfilled)
        fix = f"define it as {WANTED}, or give {needed} in {OPTIONS_FIELD}."
        raise refused(FIELD, name, f"it also needs {needed}, which {OPTIONS_FIELD} does not give", fix)


def _check_built_in(module: ModuleType, options: Mapping[str, Any]) -> None:
    try:
        module.check_options(**options)
    except ValueError as error:
        raise refused(OPTIONS_FIELD, dict(options), str(error), "fix that option.") from error


def _to_the_end(function: Callable[..., Any]) -> ComputeScore:
    """Runs what an `async def` returns. The event loop stays, so that the connections it opened can be used again."""
    runner: Any = None

    def run(**arguments: Any) -> Any:
        nonlocal runner
        returned = function(**arguments)
        if not inspect.iscoroutine(returned):
            return returned
        if runner is None:
            import asyncio

            runner = asyncio.Runner()
        return runner.run(returned)

    return run
