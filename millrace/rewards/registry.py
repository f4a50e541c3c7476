"""From a reward's name to the function that scores."""

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from millrace.errors import Unavailable, refused
from millrace.rewards.data_sources import rule_of, why_none
from millrace.rewards.locate import FunctionNotFound, Target, definition, functions, parse, parsed, source_file
from millrace.rewards.term import Scope, Term
from millrace.software import how_to_install
from millrace.validation.kinds import kind_of
from millrace.validation.names import closest

ARGUMENTS: Mapping[Scope, tuple[str, ...]] = {
    "answer": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "group": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}
"""The arguments of every scorer by its scope, given by keyword. They are verl's."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    named: frozenset[str]
    """Parameters that can be given by keyword."""
    required: frozenset[str]
    """Parameters without a default, including positional-only ones."""
    open: bool
    """Whether any keyword is accepted (`**kwargs`)."""

    @classmethod
    def of_source(cls, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Self:
        """The signature of a definition."""
        spec = function.args
        positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        without_default = positional[: len(positional) - len(spec.defaults)]
        keyword_only = {a.arg for a, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None}
        named = {a.arg for a in (*spec.args, *spec.kwonlyargs)}
        return cls(frozenset(named), frozenset(without_default) | keyword_only, spec.kwarg is not None)

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> Self:
        """The signature of a function. Raises ValueError or TypeError if Python does not know it (some built-ins)."""
        kinds = inspect.Parameter
        parameters = inspect.signature(function).parameters.values()
        named = {p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
        variadic = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        required = {p.name for p in parameters if p.default is kinds.empty and p.kind not in variadic}
        return cls(frozenset(named), frozenset(required), any(p.kind is kinds.VAR_KEYWORD for p in parameters))

    def misfit(self, scope: Scope) -> str | None:
        """Why the function cannot be called with the four arguments of `scope`; None if it can."""
        missing = [] if self.open else [name for name in ARGUMENTS[scope] if name not in self.named]
        return f"does not take {', '.join(missing)} by keyword" if missing else None

    def misfit_of_options(self, options: Mapping[str, Any], scope: Scope) -> str | None:
        """Why the function does not accept `options`; None if it does."""
        if clash := sorted(set(ARGUMENTS[scope]) & set(options)):
            return f"the options {', '.join(clash)} have the names of arguments of every scorer"
        unknown = [] if self.open else sorted(set(options) - self.named)
        return f"does not take the options {', '.join(unknown)}" if unknown else None

    def unfilled(self, options: Mapping[str, Any], scope: Scope) -> list[str]:
        """Parameters that neither the four arguments nor `options` provide."""
        return sorted(self.required - set(ARGUMENTS[scope]) - set(options))


ComputeScore = Callable[..., Any]
"""A scorer: called by keyword with the arguments of its scope; returns a number, {"score": ...} or a list."""

BY_SOURCE = "by_data_source"
BUILT_IN = {
    BY_SOURCE: "millrace.rewards.by_data_source",
    "code": "millrace.rewards.programs.scorer",
    "exact": "millrace.rewards.exact",
    "format": "millrace.rewards.format",
    "math": "millrace.rewards.math",
    "reasoning_gym": "millrace.rewards.reasoning_gym",
    "regex": "millrace.rewards.regex",
}
"""The module of each built-in reward. It has a `compute_score` whose keyword-only parameters are its options. A module
whose options can have wrong values also has a `check_options`, which raises ValueError, and imports nothing heavy. One
that needs something of the machine has a `check_machine`, which raises Unavailable."""

NEED_TRUTHS = frozenset({BY_SOURCE, "code", "exact", "math"})
"""Built-in rewards that cannot score a row without a ground truth."""
FIELD = "reward"
"""Path of the mapping in a job spec that names a function, if there is one function."""
WANTED: Mapping[Scope, str] = {
    "answer": "compute_score(data_source, solution_str, ground_truth, extra_info=None, **options)",
    "group": "compute_score(data_sources, solution_strs, ground_truths, extra_infos, **options)",
}


def choose(
    name: str, *, procedural: bool, style: str = "rule", data_source: str | None = None, field: str = FIELD
) -> str:
    """The reward that `auto` stands for: reasoning_gym for a procedural source, math for rows of style `rule`. Other
    names are returned unchanged. Raises InvalidJob for another style, and for a `data_source` that `by_data_source`
    cannot score.
    """
    if name == BY_SOURCE and data_source is not None and rule_of(data_source) is None:
        fix = "name another reward, or your own as file.py:function."
        raise refused(f"{field}.function", name, why_none(data_source), fix)
    if name != "auto":
        return name
    if procedural:
        return "reasoning_gym"
    if style == "rule":
        return "math"
    raise refused(
        f"{field}.function",
        name,
        f"reward_model.style in the data is {style!r}, and only `rule` has a built-in reward",
        f"name a reward: {', '.join(BUILT_IN)}, or your own as file.py:function.",
    )


def check(name: str, options: Mapping[str, Any] | None = None, scope: Scope = "answer", field: str = FIELD) -> None:
    """Checks whether `load` would succeed, without running the user's code: the file is parsed, and the function has to
    accept the four arguments of `scope` and `options`. `field` is the path of what names it in the job spec. Raises
    InvalidJob."""
    term = Term(name, options or {}, scope, field=field)
    _may_score_groups(term)
    try:
        target = _target(name)
        path = source_file(target)
        function = None if path is None else definition(path, target.function)
    except FunctionNotFound as error:
        raise refused(f"{field}.function", name, error.reason, error.fix) from error
    if function is not None:
        _fits(term, Signature.of_source(function))
    if name in BUILT_IN and path is not None and "check_options" in functions(parsed(path)):
        _check_built_in(importlib.import_module(BUILT_IN[name]), term)


def load(
    name: str, options: Mapping[str, Any] | None = None, scope: Scope = "answer", field: str = FIELD
) -> ComputeScore:
    """The function with `options` bound. An `async def` runs to its end in an event loop that is kept between calls.

    The result is called with keywords, outside any event loop. Raises InvalidJob for a missing file, module, function
    or dependency, a wrong signature or wrong options. Other exceptions of the user's module at import are passed on.
    """
    options = dict(options or {})
    term = Term(name, options, scope, field=field)
    _may_score_groups(term)
    try:
        target = _target(name)
        path = source_file(target)
    except FunctionNotFound as error:
        raise refused(f"{field}.function", name, error.reason, error.fix) from error
    module = import_target(f"{field}.function", name, target, path)
    function = getattr(module, target.function, None)
    if not callable(function):
        reason = f"{target.function} in {target.place} is {kind_of(function)}, not a function"
        if function is None:
            reason = f"{target.place} has no function {target.function}"
        raise refused(f"{field}.function", name, reason, "name a function of that file.")
    try:
        signature = Signature.of_callable(function)
    except (ValueError, TypeError):
        signature = Signature(frozenset(), frozenset(), open=True)
    _fits(term, signature)
    if name in BUILT_IN and hasattr(module, "check_options"):
        _check_built_in(module, term)
    if name in BUILT_IN and hasattr(module, "check_machine"):
        _check_machine(module, term)
    bound = functools.partial(function, **options) if options else function
    return bound if name in BUILT_IN else _run_to_the_end(bound)


def _target(name: str) -> Target:
    if name in BUILT_IN:
        return Target(BUILT_IN[name], "compute_score")
    if ":" not in name and (near := closest(name, BUILT_IN)) is not None:
        raise FunctionNotFound("there is no such reward", f"did you mean `{near}`?")
    return parse(name)


def import_target(field: str, name: str, target: Target, path: Path | None) -> ModuleType:
    """The module of `target`, which `name` in the field names. Raises InvalidJob if it cannot be imported; other
    exceptions of the module are passed on."""
    try:
        if target.is_file and path is not None:
            return _import_file(path.resolve())
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(target.place)
    except (ImportError, SyntaxError) as error:
        what = f"cannot be imported: {error}"
        fix = "install what it imports on the replicas' hosts, or correct the file."
        if name in BUILT_IN:
            fix = f"install the scorers on the replicas' hosts: {how_to_install('scoring')}."
        raise refused(field, name, what, fix) from error


def _import_file(path: Path) -> ModuleType:
    """The module of a file. Its folder is added to the search path, last, so that it can import other files there."""
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


def _may_score_groups(term: Term) -> None:
    if term.scope == "group" and term.function in BUILT_IN:
        reason = f"the reward {term.function} scores one answer at a time"
        raise refused(f"{term.field}.scope", term.scope, reason, "leave it out, or name a function of your own.")


def _fits(term: Term, signature: Signature) -> None:
    name, options, wanted = term.function, term.options, WANTED[term.scope]
    field, options_field = f"{term.field}.function", f"{term.field}.options"
    if reason := signature.misfit(term.scope):
        other: Scope = "answer" if term.scope == "group" else "group"
        fits_other = not signature.open and signature.misfit(other) is None
        also = f", or set {term.field}.scope to {other}, whose arguments it takes" if fits_other else ""
        raise refused(field, name, reason, f"define it as {wanted}{also}.")
    if reason := signature.misfit_of_options(options, term.scope):
        fix = f"its options are {', '.join(sorted(signature.named - set(ARGUMENTS[term.scope]))) or 'none'}."
        raise refused(options_field, dict(options), f"{name}: {reason}", fix)
    if unfilled := signature.unfilled(options, term.scope):
        needed = ", ".join(unfilled)
        fix = f"define it as {wanted}, or give {needed} in {options_field}."
        raise refused(field, name, f"also needs {needed}, which {options_field} does not give", fix)


def _check_built_in(module: ModuleType, term: Term) -> None:
    try:
        module.check_options(**term.options)
    except ValueError as error:
        raise refused(f"{term.field}.options", dict(term.options), str(error), "correct that option.") from error


def _check_machine(module: ModuleType, term: Term) -> None:
    try:
        module.check_machine()
    except Unavailable as error:
        raise refused(f"{term.field}.function", term.function, error.what.removesuffix("."), error.fix) from error


def _run_to_the_end(function: Callable[..., Any]) -> ComputeScore:
    """A function that also runs what an `async def` returns. The event loop is kept, so that open connections can be
    used again."""
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
