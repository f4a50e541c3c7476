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

    def misfit(self) -> str | None:
        """Why it cannot be called with the four arguments; None where it can."""
        missing = [] if self.open else [name for name in ARGUMENTS if name not in self.named]
        return f"it does not take {', '.join(missing)} by keyword" if missing else None

    def misfit_of_options(self, options: Mapping[str, Any]) -> str | None:
        """Why `options` cannot be given to it; None where they can."""
        if clash := sorted(set(ARGUMENTS) & set(options)):
            return f"the options {', '.join(clash)} have the names of arguments that every scorer is given"
        unknown = [] if self.open else sorted(set(options) - self.named)
        return f"it does not take the options {', '.join(unknown)}" if unknown else None

    def unfilled(self, options: Mapping[str, Any]) -> list[str]:
        """What it needs beside the four arguments and `options`."""
        return sorted(self.required - set(ARGUMENTS) - set(options))
