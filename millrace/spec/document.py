"""The text of a job spec, YAML or JSON: read at a bounded cost, with the line of every field; and new values of fields,
put into its tree (`merged`).

Numbers are those of YAML 1.2: `1e-6` is a number, and `1:30` is text instead of a number to the base of 60, which takes
time that grows with the square of its length. What merge keys (`<<`) and aliases stand for is limited, because a few
hundred bytes of them can stand for gigabytes.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from millrace.errors import InvalidJob
from millrace.validation.kinds import leaves

OPTIONS = (
    "rollout.engine_options",
    "trainer.backend_options",
    "trainer.reference.backend_options",
    "trainer.critic.backend_options",
)
"""Mappings of names that are not the spec's own: null takes one out."""


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The tree with the changes in it. Fields of a group that the changes do not name stay as they are; null removes
    one of OPTIONS. A function that takes the place of another one does not get its options. `above` is the path of
    `tree` in the whole spec, with a dot at its end."""
    both = dict(tree)
    for name, value in changes.items():
        held = both.get(name)
        if isinstance(value, Mapping) and isinstance(held, Mapping) and not _another_function(held, value):
            both[name] = merged(held, value, f"{above}{name}.")
        elif value is None and above.startswith(tuple(f"{group}." for group in OPTIONS)):
            both.pop(name, None)
        else:
            both[name] = value
    return both


def _another_function(held: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether both choose a function by its name, with options, and not the same one."""
    return set(held) <= {"name", "options"} and value.get("name", held.get("name")) != held.get("name")


MOST_CHARACTERS = 1_000_000
MOST_EVENTS = 300_000
"""Values, beginnings and ends of lists and mappings in a text."""
DEEPEST = 60
"""Levels of lists and mappings. Both the parser and what reads its result call themselves for each level."""
MOST_MERGED = 10_000
"""Fields that the merge keys of a text bring into other mappings."""
LONGEST_NUMBER = 400
"""Characters of a number."""
UNREADABLE = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What PyYAML raises: its own errors, and others if a scalar does not fit its tag."""

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser if PyYAML was built with it, which is ten times faster."""


class _Loader(_Base):  # type: ignore[misc]  # known at run time only
    """PyYAML's safe loader within the limits above. A field that is given twice is an error."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (f"{_TAG}int", f"{_TAG}float")]
        for first, found in _Base.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str | bytes) -> None:
        super().__init__(text)
        self._merged = 0
        self._flat: set[int] = set()

    def flatten_mapping(self, node: MappingNode) -> None:
        """Puts the fields of merge keys into `node`, before its own, which replace them."""
        if id(node) in self._flat:
            return
        self._flat.add(id(node))
        fields, node.value = node.value, [each for each in node.value if each[0].tag != f"{_TAG}merge"]
        self._check_names(node)
        merged: list[tuple[Node, Node]] = []
        for key, value in fields:
            if key.tag == f"{_TAG}merge":
                sources = value.value if isinstance(value, SequenceNode) else [value]
                for source in reversed(sources):  # the first one counts if several have the same field
                    if not isinstance(source, MappingNode):
                        raise ConstructorError(None, None, "`<<` merges mappings only", value.start_mark)
                    self.flatten_mapping(source)
                    self._merged += len(source.value)
                    if self._merged > MOST_MERGED:
                        problem = f"merge keys bring more than {MOST_MERGED} fields into other mappings"
                        raise ConstructorError(None, None, problem, value.start_mark)
                    merged += source.value
        node.value = merged + node.value

    def _check_names(self, node: MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                if key.value in seen:
                    raise ConstructorError(None, None, f"the field {key.value!r} is given twice", key.start_mark)
                seen.add(key.value)

    def construct_yaml_int(self, node: ScalarNode) -> Any:
        self._check_number(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: ScalarNode) -> Any:
        self._check_number(node)
        return super().construct_yaml_float(node)

    def _check_number(self, node: ScalarNode) -> None:
        if ":" in node.value or len(node.value) > LONGEST_NUMBER:
            raise ConstructorError(None, None, f"{node.value[:40]!r} is not a number", node.start_mark)


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


class Document:
    """A text of YAML or JSON that was read."""

    def __init__(self, text: str | bytes) -> None:
        """Raises one of UNREADABLE."""
        _check_size(text)
        loader = _Loader(text)
        try:
            self._root: Node | None = loader.get_single_node()
            self.tree: Any = None if self._root is None else loader.construct_document(self._root)
            """The value of the text: mappings, lists, texts, numbers."""
        finally:
            loader.dispose()
        self._changed: tuple[str, ...] = ()

    @classmethod
    def of_file(cls, path: Path) -> "Document":
        """The document in a file. Raises InvalidJob."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidJob(f"{path}: is not text in UTF-8.", "give the path of a YAML or JSON file.") from error
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise InvalidJob(f"{path}: {reason}.", "give the path of a YAML or JSON file that can be read.") from error
        except UNREADABLE as error:
            place = getattr(error, "problem_mark", None)
            fix = "correct the syntax." if place is None else f"correct the YAML syntax in line {place.line + 1}."
            raise InvalidJob(f"{path}: is neither YAML nor JSON: {error}.", fix) from error

    def change(self, changes: Mapping[str, Any]) -> None:
        """Puts new values of fields over those of the text, once. Such a field has no line any more."""
        if isinstance(self.tree, Mapping):
            self.tree = merged(self.tree, changes)
            self._changed = tuple(path for path, _ in leaves(changes))

    def line_of(self, field: str) -> int:
        """The line of a field, from 1, or of the nearest level above it that is there; 0 if there is none."""
        if any(f"{field}.".startswith(f"{path}.") for path in self._changed):
            return 0
        line, level = 0, self._root
        for step in field.split("."):
            if isinstance(level, MappingNode):
                keys = [(key, value) for key, value in level.value if getattr(key, "value", None) == step]
                if not keys:
                    break
                line, level = keys[-1][0].start_mark.line + 1, keys[-1][1]
            elif isinstance(level, SequenceNode) and step.isdecimal() and int(step) < len(level.value):
                level = level.value[int(step)]
                line = level.start_mark.line + 1
            else:
                break
        return line

    @contextlib.contextmanager
    def lines(self) -> Iterator[None]:
        """Adds the lines of this document to the mistakes of an InvalidJob that is raised inside."""
        try:
            yield
        except InvalidJob as error:
            raise error.located(self.line_of) from error


def _check_size(text: str | bytes) -> None:
    """Raises ValueError or YAMLError for a text that takes too long to read."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and a job spec has at most {MOST_CHARACTERS}")
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST or count > MOST_EVENTS:
            reason = f"more than {DEEPEST} levels" if depth > DEEPEST else f"more than {MOST_EVENTS} values"
            raise ConstructorError(None, None, f"it has {reason}", event.start_mark)  # type: ignore[arg-type]
