"""Whether a function can be called as a scorer, by its source or by the function itself."""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from millrace.rewards.term import Scope

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
