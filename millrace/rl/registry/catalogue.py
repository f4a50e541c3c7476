"""The algorithms and their options, read from the signatures in their files. Needs no torch.

An algorithm is a function of keyword-only parameters. Its signature is read with `ast`: so a job can be validated where
torch is not installed, and the service that validates a user's file does not execute it.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from millrace.errors import InvalidJob, refused
from millrace.imports import syntax_tree
from millrace.rl.registry.options import TYPES
from millrace.validation.mistakes import explain
from millrace.validation.names import choose, closest

HERE = Path(__file__).parents[1]


class AlgorithmKind(StrEnum):
    """The kinds of algorithms that have a file each; the value is the name of their folder."""

    ADVANTAGE = "advantages"
    POLICY_LOSS = "policy_losses"
    CORRECTION = "corrections"
    DISTILLATION = "distillation_losses"

    @property
    def singular(self) -> str:
        """The kind in words, for messages."""
        return {
            "advantages": "advantage",
            "policy_losses": "policy loss",
            "corrections": "correction",
            "distillation_losses": "distillation loss",
        }[self.value]


INPUTS: dict[AlgorithmKind, frozenset[str]] = {
    AlgorithmKind.ADVANTAGE: frozenset(
        {
            "token_rewards_bt",
            "mask_bt",
            "group_b",
            "values_bt",  # of the critic
            "greedy_rewards_b",  # reward of the greedy answer to the same prompt
            "rewards_bk",  # the separate rewards that reward.parts names
            "old_logprobs_bt",
            "sum_pi_squared_bt",  # sum over the vocabulary of squared probabilities, at each token
            "weights_bt",  # importance weights of a correction
            "turn_starts_bt",  # true at the first token of each turn
        }
    ),
    AlgorithmKind.POLICY_LOSS: frozenset(
        {
            "logprobs_bt",
            "old_logprobs_bt",
            "advantages_bt",
            "mask_bt",
            "behaviour_logprobs_bt",  # under the policy that generated the tokens
            "selected_bt",  # tokens chosen over the whole step, see losses.selected_tokens
        }
    ),
    AlgorithmKind.DISTILLATION: frozenset(
        {
            "logprobs_bt",
            "old_logprobs_bt",
            "teacher_logprobs_bt",
            "mask_bt",
            "weights_bt",  # importance weights of a correction
            "top_logprobs_btk",  # of the teacher's most likely tokens, under the policy
            "teacher_top_logprobs_btk",  # and under the teacher
        }
    ),
    AlgorithmKind.CORRECTION: frozenset({"train_logprobs_bt", "rollout_logprobs_bt", "mask_bt"}),
}
"""The tensors that a trainer can pass to each kind of algorithm."""

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "token-sum-norm",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
NEEDS_HORIZON = frozenset({"token-sum-norm", "seq-mean-token-sum-norm"})
"""The aggregations that divide by the horizon, the largest number of tokens that an answer may have."""


@dataclass(frozen=True)
class Option:
    """One option of an algorithm."""

    name: str
    annotation: str
    default: Any
    adapter: TypeAdapter[Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.annotation} = {self.default!r}"


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm: its name, its file, the tensors that it takes and its options."""

    kind: AlgorithmKind
    name: str
    path: Path
    function: str
    summary: str
    """The first paragraph of the function's docstring, or else of the file's."""
    arxiv: tuple[str, ...]
    """Ids of the papers that the docstrings name."""
    required_inputs: frozenset[str]
    optional_inputs: frozenset[str]
    options: tuple[Option, ...]
    gives_weights: bool
    """Whether it is a correction that gives importance weights. One that only rejects is annotated to return None."""
    separable: bool | Mapping[str, Any] = False
    """The file's constant `SEPARABLE`: an advantage or a correction gives each group of a batch the same as it gives
    that group alone. A mapping says with which values of options it does so. Without the constant it needs the whole
    batch."""

    @property
    def is_user_defined(self) -> bool:
        """Whether the job names it as `file.py:function`."""
        return ":" in self.name

    @property
    def needs_critic(self) -> bool:
        """Whether it cannot be computed without a critic's values."""
        return "values_bt" in self.required_inputs

    @property
    def inputs(self) -> frozenset[str]:
        """Names of all tensors that it takes, required or optional."""
        return self.required_inputs | self.optional_inputs

    def is_separable(self, given: Mapping[str, Any]) -> bool:
        """Whether it gives each group, with the options `given` by a job, the same alone as in the whole batch."""
        if isinstance(self.separable, bool):
            return self.separable
        values = {**self.defaults, **given}
        return all(values[name] == value for name, value in self.separable.items())

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The value of each option that a job does not give."""
        return {option.name: option.default for option in self.options}

    def check(self, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """Checks the options `given` by a job. Returns the values of all options, defaults included.

        `where` is the field of the job spec that has the options; errors name it. Raises InvalidJob.
        """
        prefix = f"{where}." if where else ""
        adapters = {option.name: option.adapter for option in self.options}
        checked = dict(self.defaults)
        for name, value in given.items():
            if name not in adapters:
                near = closest(name, adapters)
                suggested = f"did you mean `{near}`? The options are" if near else "the options are"
                fix = f"{suggested} {', '.join(adapters)}." if adapters else "remove it: there are no options."
                raise refused(
                    f"{prefix}{name}", value, f"the {self.kind.singular} {self.name!r} has no such option", fix
                )
            try:
                checked[name] = adapters[name].validate_python(value)
            except ValidationError as error:
                raise InvalidJob.of(explain(error.errors(), above=f"{prefix}{name}")) from error
        return checked


def names(kind: AlgorithmKind) -> tuple[str, ...]:
    """Names of the built-in algorithms of a kind, sorted."""
    return tuple(sorted(_files(kind)))


@cache
def _files(kind: AlgorithmKind) -> Mapping[str, Path]:
    """The file of each built-in algorithm of a kind. `tis.py` has the function `tis`, or `tis_token` and others."""
    return {
        node.name: path
        for path in (HERE / kind.value).glob("[!_]*.py")
        for node in syntax_tree(path).body
        if isinstance(node, ast.FunctionDef) and f"{node.name}_".startswith(f"{path.stem}_")
    }


def find(kind: AlgorithmKind, name: str, where: str = "") -> AlgorithmEntry:
    """The entry of a built-in name or of a user's `file.py:function`. Raises InvalidJob; `where` names the field."""
    if ":" in name:
        path, function = name.rsplit(":", 1)
        return _read(kind, name, Path(path), function, where)
    if name not in names(kind):
        fix = f"{choose(name, names(kind))[:-1]}, or your own as file.py:function."
        raise refused(where or kind.singular, name, f"there is no such {kind.singular}", fix)
    return _built_in(kind, name)


@cache
def _built_in(kind: AlgorithmKind, name: str) -> AlgorithmEntry:
    return _read(kind, name, _files(kind)[name], name, "")


def _read(kind: AlgorithmKind, name: str, path: Path, function: str, where: str) -> AlgorithmEntry:
    field = where or kind.singular
    try:
        tree = syntax_tree(path)
    except (OSError, SyntaxError, ValueError) as error:
        fix = "name a Python file as file.py:function."
        raise refused(field, name, f"{path} cannot be read: {error}", fix) from None
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not found:
        raise refused(field, name, f"{path} defines no function {function!r}", "name one of its top-level functions.")
    try:
        return _entry(kind, name, path, tree, found[-1])
    except ValueError as error:
        known = ", ".join(sorted(INPUTS[kind]))
        fix = f"take tensors by keyword out of {known}, annotated Tensor, and options with a default and a type."
        raise refused(field, name, str(error), fix) from error


def _entry(kind: AlgorithmKind, name: str, path: Path, tree: ast.Module, node: ast.FunctionDef) -> AlgorithmEntry:
    arguments = node.args
    if arguments.posonlyargs or arguments.args or arguments.vararg or arguments.kwarg:
        raise ValueError("its parameters have to be keyword-only, without * or ** catch-alls")
    required: set[str] = set()
    optional: set[str] = set()
    options: list[Option] = []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        if re.fullmatch(r"(torch\.)?Tensor( \| None)?", annotation):
            (required if default is None else optional).add(argument.arg)
        elif default is None or argument.annotation is None:
            raise ValueError(f"its option {argument.arg!r} has no default or no type")
        else:
            adapter: TypeAdapter[Any] = TypeAdapter(_type_of(argument.annotation, argument.arg))
            options.append(Option(argument.arg, annotation, _constant(default, argument.arg), adapter))
    unknown = (required | optional) - INPUTS[kind]
    if unknown:
        raise ValueError(f"no {kind.singular} is given {', '.join(sorted(unknown))}")
    text = f"{ast.get_docstring(node) or ''}\n{ast.get_docstring(tree) or ''}"
    summary = (ast.get_docstring(node) or ast.get_docstring(tree) or name).split("\n\n")[0].replace("\n", " ")
    arxiv = tuple(dict.fromkeys(re.findall(r"arXiv[ :](\d{4}\.\d{4,5})", text)))
    return AlgorithmEntry(
        kind=kind,
        name=name,
        path=path,
        function=node.name,
        summary=summary,
        arxiv=arxiv,
        required_inputs=frozenset(required),
        optional_inputs=frozenset(optional),
        options=tuple(options),
        gives_weights=kind is AlgorithmKind.CORRECTION and not _first_result_is_none(node.returns),
        separable=_separable(tree, {option.name for option in options}),
    )


SEPARABLE = "SEPARABLE"
"""Name of the constant in a file, see `AlgorithmEntry.separable`."""


def _separable(tree: ast.Module, options: set[str]) -> bool | Mapping[str, Any]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=assigned) if name == SEPARABLE:
                value = _literal(assigned, f"its constant {SEPARABLE}")
                if isinstance(value, bool) or (isinstance(value, dict) and value.keys() <= options):
                    return value
                raise ValueError(f"its constant {SEPARABLE} is {value!r}, neither true or false nor values of options")
    return False


def _first_result_is_none(annotation: ast.expr | None) -> bool:
    """Whether a function is annotated to return `tuple[None, ...]`."""
    match annotation:
        case ast.Subscript(slice=ast.Tuple(elts=[ast.Constant(value=None), *_])):
            return True
    return False


def _constant(default: ast.expr, option: str) -> Any:
    return _literal(default, f"the default of its option {option!r}")


def _literal(value: ast.expr, what: str) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise ValueError(f"{what}, `{ast.unparse(value)}`, is no constant") from None


def _type_of(annotation: ast.expr, option: str) -> Any:
    match annotation:
        case ast.Name(id=name) if name in TYPES:
            return TYPES[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _type_of(left, option) | None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            values = ast.literal_eval(choices)
            return Literal[values if isinstance(values, tuple) else (values,)]
    raise ValueError(
        f"the type of its option {option!r}, `{ast.unparse(annotation)}`, is not one of {', '.join(TYPES)}"
    )
