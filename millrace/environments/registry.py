"""From the name of an environment to its class, found without running the user's code, or loaded."""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from millrace.environments import Environment
from millrace.environments.built_in import BUILT_IN, TOOLS, VERIFIERS, Verl, options_of
from millrace.errors import refused
from millrace.rewards.locate import FunctionNotFound, bound_to, parse, source_file
from millrace.rewards.registry import import_target
from millrace.validation.kinds import kind_of

FIELD = "rollout.environment.name"
FIX = (
    "name a class with `async def step(self, message)`, for example /data/environments/game.py:Game, or one of "
    f"{', '.join(BUILT_IN)}."
)


def check(name: str, options: Mapping[str, Any], *, has_servers: bool = False) -> None:
    """Checks whether the class exists, without running the user's code, or whether a built-in environment has its
    options. `has_servers`: there are MCP servers with tools. Raises InvalidJob."""
    if name in BUILT_IN:
        given = options_of(name, options)
        if isinstance(given, Verl):
            given.check()
        if name == VERIFIERS and has_servers:
            fix = "give the servers to the environment in its host."
            raise refused("rollout.environment.mcp", name, "a host's environment has its tools by itself", fix)
        if name == TOOLS and not has_servers:
            fix = "name servers in `mcp`, or the class of an environment in `name`."
            raise refused("rollout.environment.mcp", [], "the environment has neither a class nor tools", fix)
    else:
        _check_class(name)


def _check_class(name: str) -> None:
    try:
        target = parse(name)
        path = source_file(target)
        found = None if path is None else bound_to(path, target.function, "class")
    except FunctionNotFound as error:
        raise refused(FIELD, name, error.reason, FIX) from error
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        raise refused(FIELD, name, f"{target.function} is a function, not a class", FIX)
    if isinstance(found, ast.ClassDef) and not found.bases:
        methods = {each.name for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        if missing := [each for each in ("reset", "step", "score", "close") if each not in methods]:
            reason = f"the class {target.function} has no {', '.join(missing)}"
            raise refused(
                FIELD, name, reason, "derive it from millrace.environments.Environment, which has the others."
            )


def load(name: str, options: Mapping[str, Any]) -> type:
    """The class. Raises InvalidJob for a missing file, module or class, and for options that it does not take. Other
    exceptions of the user's module at import are passed on."""
    try:
        target = parse(name)
        path = source_file(target)
    except FunctionNotFound as error:
        raise refused(FIELD, name, error.reason, FIX) from error
    found = getattr(import_target(FIELD, name, target, path), target.function, None)
    if not inspect.isclass(found):
        raise refused(FIELD, name, f"{target.function} in {target.place} is {kind_of(found)}, not a class", FIX)
    if missing := [each for each in ("reset", "step", "score", "close") if not callable(getattr(found, each, None))]:
        raise refused(FIELD, name, f"the class has no {', '.join(missing)}", FIX)
    if getattr(found, "step", None) is Environment.step:
        raise refused(FIELD, name, f"the class {target.function} has no step", FIX)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        field = "rollout.environment.options"
        raise refused(field, dict(options), f"{name}: {error}", "give the arguments of its __init__.") from error
    return found
