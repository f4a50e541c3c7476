"""verl's two files: the tools that the policy may call, and the interactions that answer its turns.

`tools: [{class_name, config, tool_schema}]` and `interaction: [{name, class_name, config}]`.
"""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from millrace.errors import refused

FIELD = "rollout.environment.options"


@dataclass(frozen=True)
class Named:
    """A class that a file names, with what it is made with."""

    class_name: str
    """`package.module.Class`."""
    config: Mapping[str, Any]
    rest: Mapping[str, Any]
    """The other fields of the class: `tool_schema` of a tool, `name` of an interaction."""


def read(path: str, key: str) -> list[Named]:
    """The classes that a file names under `key`, `tools` or `interaction`. Raises InvalidJob."""
    field = f"{FIELD}.{key}"
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise refused(field, path, f"cannot be read: {error}", "name a YAML file of verl's.") from error
    entries = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries:
        raise refused(field, path, f"has no list `{key}`", f"name a file with `{key}:` as verl reads it.")
    return [_named(field, path, number, entry) for number, entry in enumerate(entries)]


def _named(field: str, path: str, number: int, entry: Any) -> Named:
    name = entry.get("class_name") if isinstance(entry, dict) else None
    config = (entry.get("config") or {}) if isinstance(entry, dict) else None
    if not isinstance(name, str) or "." not in name or not isinstance(config, dict):
        fix = "give each entry `class_name: package.module.Class` and `config`."
        raise refused(field, path, f"entry {number} names no class", fix)
    if config.get("type") == "mcp":
        fix = "name the server in rollout.environment.mcp instead."
        raise refused(field, path, f"entry {number} is a tool of an MCP server", fix)
    return Named(name, config, {key: each for key, each in entry.items() if key not in ("class_name", "config")})


def imported(named: Named, folder: Path) -> type:
    """The class. It is looked for on Python's path and in `folder`. Raises ImportError, AttributeError, and what the
    user's module raises."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module, _, name = named.class_name.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
