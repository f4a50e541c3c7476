"""From the name of an algorithm to its function: built in, or of a file of the user, whose errors become InvalidJob;
and the advantages of a batch by the estimator that the job names."""

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from millrace.errors import InvalidJob, MillraceError
from millrace.rl.registry.catalogue import AlgorithmEntry, AlgorithmKind, find


def load_algorithms(chosen: Iterable[tuple[AlgorithmKind, str]]) -> None:
    """Imports these algorithms, so that later calls cannot fail at it. Users' files are read again.

    Raises InvalidJob.
    """
    load_file.cache_clear()
    for kind, name in chosen:
        function_of(find(kind, name))


def call_algorithm(kind: AlgorithmKind, name: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Calls the algorithm with those of `inputs` that it takes and with the checked `options`; gives what it returns.

    Raises InvalidJob if an input or option is missing or wrong, and for whatever a user's function raises.
    """
    entry = find(kind, name)
    given = {key: value for key, value in inputs.items() if value is not None and key in entry.inputs}
    missing = entry.required_inputs - given.keys()
    if missing:
        fix = "Give the job a critic." if "values_bt" in missing else "Pass it."
        raise InvalidJob(f"The {kind.singular} {name!r} needs {', '.join(sorted(missing))}.", fix)
    function, checked = function_of(entry), entry.check(options)
    with errors_with_place(entry):
        returned = function(**given, **checked)
        if entry.is_user_defined:
            check_returned(entry, returned, inputs)
        return returned


def function_of(entry: AlgorithmEntry) -> Callable[..., Any]:
    """The function that implements `entry`. Raises InvalidJob if a user's file fails."""
    with errors_with_place(entry):
        function: Callable[..., Any] = getattr(module_of(entry), entry.function)
        return function


def module_of(entry: AlgorithmEntry) -> ModuleType:
    """The module that defines `entry`; executes a user's file on first use. Raises InvalidJob if that fails."""
    if entry.is_user_defined:
        with errors_with_place(entry):
            return load_file(entry.path.resolve())
    return importlib.import_module(f"millrace.rl.{entry.kind.value}.{entry.path.stem}")


LOSS = "(loss_bt, metrics_bt): the loss of each token, [B, T], and the metrics of each token by name"
RETURNS = {
    AlgorithmKind.ADVANTAGE: "(advantages_bt, returns_bt), both [B, T]",
    AlgorithmKind.POLICY_LOSS: LOSS,
    AlgorithmKind.DISTILLATION: LOSS,
    AlgorithmKind.CORRECTION: "(weights_bt, keep_bt, metrics_bt): weights [B, T] or None, bool [B, T], and the metrics"
    " of each token by name",
}


@cache
def load_file(path: Path) -> ModuleType:
    """The module of a user's file, which is executed once. Raises InvalidJob if it is not a Python file."""
    spec = importlib.util.spec_from_file_location(f"millrace_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidJob(f"{path} is not a Python file.", "Name your algorithm as file.py:function.")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@contextmanager
def errors_with_place(entry: AlgorithmEntry) -> Iterator[None]:
    """Turns what a user's function raises inside into InvalidJob with file and line; leaves built-in ones alone, and
    torch.OutOfMemoryError, which is not the function's fault."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a user's code may raise anything, and the trainer must survive it
        if not entry.is_user_defined:
            raise
        load_file.cache_clear()  # the job may be resumed after the file was corrected
        if isinstance(error, MillraceError):
            raise
        what = f"{_field(entry)}: {entry.function} failed at {_place(error, entry.path.resolve())}: "
        raise InvalidJob(f"{what}{type(error).__name__}: {error}", "fix the file, then submit or resume.") from error


def check_returned(entry: AlgorithmEntry, returned: Any, inputs: Mapping[str, Any]) -> None:
    """Raises InvalidJob if `returned` is not what a function of this kind has to return for `inputs`."""
    shape = inputs["mask_bt"].shape
    match entry.kind, returned:
        case AlgorithmKind.ADVANTAGE, (advantages, returns):
            right = _fits(advantages, shape) and _fits(returns, shape)
        case AlgorithmKind.POLICY_LOSS | AlgorithmKind.DISTILLATION, (loss, shares):
            gradient_wanted = torch.is_grad_enabled() and inputs["logprobs_bt"].requires_grad
            right = _fits(loss, shape) and _reported(shares, shape) and (loss.requires_grad or not gradient_wanted)
        case AlgorithmKind.CORRECTION, (weights, keep, shares):
            right = (weights is None or _fits(weights, shape)) and _fits(keep, shape) and keep.dtype == torch.bool
            right = right and _reported(shares, shape, by_sequence=True)
        case _:
            right = False
    if not right:
        found = f"with a batch of [{shape[0]}, {shape[1]}] it gave {_described(returned)}"
        fix = f"return {RETURNS[entry.kind]}; a loss carries the gradient of logprobs_bt."
        raise InvalidJob(f"{_field(entry)}: {entry.name} returns what cannot be used: {found}.", fix)


def _field(entry: AlgorithmEntry) -> str:
    if entry.kind is AlgorithmKind.DISTILLATION:
        return "algorithm.distillation.loss.name"
    return f"algorithm.{entry.kind.singular.replace(' ', '_')}.name"


def _place(error: Exception, path: Path) -> str:
    """`file:line` of the innermost frame in the user's file, or of the innermost frame at all."""
    frames = traceback.extract_tb(error.__traceback__)
    candidates = [frame for frame in frames if frame.filename == str(path)] or frames
    return f"{candidates[-1].filename}:{candidates[-1].lineno}"


def _fits(value: Any, shape: torch.Size) -> bool:
    """Whether `value` is a tensor that broadcasts to `shape`, [B, T]."""
    is_matrix = isinstance(value, Tensor) and value.dim() == 2
    return is_matrix and all(size in (1, full) for size, full in zip(value.shape, shape, strict=True))


def _reported(metrics: Any, shape: torch.Size, *, by_sequence: bool = False) -> bool:
    """Whether `metrics` has a tensor for each name: a scalar, one that fits [B, T], or with `by_sequence` also [B]."""
    return isinstance(metrics, Mapping) and all(
        isinstance(name, str)
        and isinstance(metric, Tensor)
        and (metric.dim() == 0 or _fits(metric, shape) or (by_sequence and metric.shape == shape[:1]))
        for name, metric in metrics.items()
    )


def _described(value: Any) -> str:
    match value:
        case Tensor():
            gradient = " with gradient" if value.requires_grad else ""
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{gradient}"
        case tuple() | list():
            return f"({', '.join(map(_described, value))})"
        case Mapping():
            return "{" + ", ".join(f"{name}: {_described(part)}" for name, part in value.items()) + "}"
    return type(value).__name__


@torch.no_grad()
def advantage(
    name: str,
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    values_bt: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, both [B, T] in the rewards' dtype, by the estimator `name`.

    Everything is computed in float64: in float32 equal rewards that were earned in another order, or in other parts,
    have different sums, and a group's standard deviation makes such a difference large. The caller passes a step's
    whole batch, because group and batch statistics are computed over these tensors.

    token_rewards_bt: float [B, T], float64 where rewards have several parts; the reward of an outcome is at the last
        generated token. Rewards where the mask is false are not read.
    mask_bt: [B, T], true for generated tokens, false for observations between turns. A row is an episode: the tokens
        of its trajectories follow each other, so that baselines count episodes, and what is summed up to the end of
        the episode goes on from one trajectory to the next.
    group_b: integer [B]; equal for the episodes of one prompt.
    values_bt: float [B, T]; the critic's values, for estimators that need them.
    options: the estimator's options, and the other tensors that it takes.

    Raises InvalidJob for an unknown name or option, or a missing tensor.
    """
    mask_bt = mask_bt.bool()
    inputs = {"token_rewards_bt": token_rewards_bt, "values_bt": values_bt, "group_b": group_b}
    inputs |= {key: options.pop(key) for key in list(options) if isinstance(options[key], Tensor)}
    exact = {
        key: value.double() if value.is_floating_point() else value
        for key, value in inputs.items()
        if value is not None
    }
    blanked = {key: torch.where(mask_bt, value, 0) if key.endswith("_bt") else value for key, value in exact.items()}
    both = call_algorithm(AlgorithmKind.ADVANTAGE, name, {**blanked, "mask_bt": mask_bt}, options)
    advantages_bt, returns_bt = (torch.where(mask_bt, each, 0).to(token_rewards_bt.dtype) for each in both)
    return advantages_bt, returns_bt
