"""Whether a function can be called as a scorer, judged from its source or from the function itself."""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every scorer is given, by keyword."""


@dataclass(frozen=True)
class Signature:
    named: frozenset[str]
    """Parameters that can be given by keyword."""
    required: frozenset[str]
    """Parameters without a default, those that are positional only included."""
    open: bool
    """Whether it takes any keyword (`**kwargs`)."""

    @classmethod
    def of_source(cls, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Self:
        spec = function.args
        positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        without_default = positional[: len(positional) - len(spec.defaults)]
        keyword_only = {a.arg for a, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None}
        named = {a.arg for a in (*spec.args, *spec.kwonlyargs)}
        return cls(frozenset(named), frozenset(without_default) | keyword_only, spec.kwarg is not None)

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> Self:
        """Raises ValueError or TypeError where Python does not know the signature (some built-in functions)."""
        kinds = inspect.Parameter
        parameters = inspect.signature(function).parameters.values()
        named = {p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
        variadic = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        required = {p.name for p in parameters if p.default is kinds.empty and p.kind not in variadic}
        return cls(frozenset(named), frozenset(required), any(p.kind is kinds.VAR_KEYWORD for p in parameters))

    def misfit(self, options: Mapping[str, Any]) -> str | None:
        """Why it cannot be called with the four arguments and `options`; None where it can."""
        if clash := sorted(set(ARGUMENTS) & set(options)):
            return f"the options {', '.join(clash)} have the names of arguments that every scorer is given"
        if not self.open:
            if missing := [name for name in ARGUMENTS if name not in self.named]:
                return f"it does not take {', '.join(missing)} by keyword"
            if unknown := sorted(set(options) - self.named):
                return f"it does not take the options {', '.join(unknown)}"
        if unfilled := sorted(self.required - set(ARGUMENTS) - set(options)):
            return f"it also needs {', '.join(unfilled)}, which the options do not give"
        return None
