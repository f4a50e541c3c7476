"""Finding the function that a name means, without running any of the code around it."""

import ast
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from millrace.imports import syntax_tree


class FunctionNotFound(Exception):
    """There is no such function; `reason` says why, and `fix` what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True)
class Target:
    """What a name like `module:function` or `path/to/file.py:function` says."""

    place: str
    function: str

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py") or "/" in self.place


def parse(name: str) -> Target:
    """Raises FunctionNotFound if `name` has not the form `<module or file>:<function>`."""
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise FunctionNotFound(
            "is not a built-in reward, and does not have the form module:function or file.py:function",
            "name a built-in reward, or write for example /data/rewards/mine.py:compute_score.",
        )
    return Target(place, function)


def source_file(target: Target) -> Path | None:
    """The Python file that holds the target; None for a module that has no Python source. Raises FunctionNotFound."""
    return _file(target.place) if target.is_file else _module_file(target.place)


def _file(place: str) -> Path:
    path = Path(place).expanduser()
    if not path.is_file():
        raise FunctionNotFound(
            f"there is no file {path.absolute()}",
            "give the absolute path of a Python file: every service has a working folder of its own.",
        )
    return path


def _module_file(name: str) -> Path | None:
    """The file of a module. Packages are searched by their folders from the outermost inwards, so that no `__init__`
    runs."""
    folders: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth, part in enumerate(parts, start=1):
        dotted = ".".join(parts[:depth])
        spec = _find(dotted, folders) if part.isidentifier() else None
        if spec is None:
            raise FunctionNotFound(
                f"there is no module {dotted}",
                "install the package that holds it, or name the file instead: /path/to/file.py:function.",
            )
        folders = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _find(dotted: str, folders: list[str] | None) -> ModuleSpec | None:
    """The module by the finders that Python would ask, in their order; at the top level the working folder is last."""
    for finder in sys.meta_path:
        if spec := finder.find_spec(dotted, folders):
            return spec
    return PathFinder.find_spec(dotted, [str(Path.cwd())]) if folders is None else None


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises FunctionNotFound for a file that is not Python."""
    try:
        return syntax_tree(path)
    except (SyntaxError, ValueError, OSError) as error:
        raise FunctionNotFound(f"{path} is not readable as Python: {error}", "correct the file.") from error


def functions(tree: ast.Module) -> list[str]:
    """The names of all functions at the top level."""
    return [s.name for s in _top_level(tree) if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]


def definition(path: Path, function: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The definition of `function` in `path`; None if only running the file can find it: after an assignment, an import
    or a decorator that may change the signature. Raises FunctionNotFound."""
    found = bound_to(path, function)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and not found.decorator_list:
        return found
    return None


def bound_to(path: Path, name: str, kind: str = "function") -> ast.stmt:
    """The last statement at the top level of `path` that binds `name`, which should be a function or of another `kind`.
    Raises FunctionNotFound."""
    tree = parsed(path)
    found = [statement for statement in _top_level(tree) if _binds(statement, name)]
    if not found:
        there = functions(tree)
        have = f"it has {', '.join(there[:8])}" if there else "it defines no function"
        raise FunctionNotFound(f"{path} has no {kind} {name}; {have}", f"name a {kind} of that file.")
    return found[-1]


def _top_level(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run when the file is imported, including those under `if`, `try` and `with`."""
    statements: list[ast.stmt] = []
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt):
            statements.append(node)
        if isinstance(node, ast.If | ast.Try | ast.TryStar | ast.With | ast.ExceptHandler):
            pending += reversed(list(ast.iter_child_nodes(node)))
    return statements


def _binds(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound):
            return bound == name
        case ast.Import() | ast.ImportFrom():
            return any(a.name == "*" or (a.asname or a.name) == name for a in statement.names)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return any(isinstance(n, ast.Name) and n.id == name for t in targets for n in ast.walk(t))
    return False
