"""The copies that an engine's own loader makes, recorded while it runs once.

An engine fuses tensors (q, k and v into one parameter), splits them over workers and pads them; its loaders know how.
Instead of keeping a second, hand-written map, the loader is run once while every copy it makes is recorded: which
slice of which manifest tensor went to which slice of which parameter. From then on the parameters can be read back in
manifest terms and compared bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.weights.loader.patches import Concatenations, pools_run_inline

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A view of a storage: offset, shape and strides, in elements."""


@dataclass(frozen=True)
class LoaderCopy:
    """One copy: a slice of tensor `name` was written to a slice of the storage of parameter `parameter`."""

    name: str
    source: Strided
    parameter: str
    target: Strided


@dataclass(frozen=True)
class LoaderCopies:
    """All copies of one run of the loader."""

    copies: tuple[LoaderCopy, ...]
    unknown: tuple[str, ...]
    """Tensors of which no copy was seen: not used by this worker, or changed on the way."""
    parameters: Mapping[str, torch.Tensor] = field(repr=False)

    def mismatches(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the tensors whose copies are not bit for bit as in `tensors`."""
        wrong = []
        for copy in self.copies:
            expected = torch.as_strided(tensors[copy.name], copy.source[1], copy.source[2], copy.source[0])
            held = self._held(copy)
            if not torch.equal(_bits(held), _bits(expected).to(held.device)):
                wrong.append(copy.name)
        return sorted(set(wrong))

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Tensor `name` as the parameters hold it now, shaped as `like`; NaN if this worker holds nothing of it."""
        whole = torch.full_like(like, float("nan"))
        for copy in self.copies:
            if copy.name == name:
                torch.as_strided(whole, copy.source[1], copy.source[2], copy.source[0]).copy_(self._held(copy))
        return whole

    def _held(self, copy: LoaderCopy) -> torch.Tensor:
        offset, shape, strides = copy.target
        return torch.as_strided(self.parameters[copy.parameter].detach(), shape, strides, offset)


def record_copies(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> LoaderCopies:
    """Runs `load` once on `tensors` (contiguous, whole) and records every copy from them into `parameters`."""
    recorder = _Recorder(tensors, parameters)
    with torch.no_grad(), pools_run_inline(), recorder:
        load(iter(tensors.items()))
    seen = {copy.name for copy in recorder.copies}
    return LoaderCopies(tuple(recorder.copies), tuple(n for n in tensors if n not in seen), parameters)


class _Recorder(TorchDispatchMode):
    """Sees every `copy_` and recognises source and target by their storages."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.copies: list[LoaderCopy] = []
        self._concatenations = Concatenations()
        self._sources = {t.untyped_storage().data_ptr(): name for name, t in tensors.items()}
        self._targets = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            for target, source in self._concatenations.split_copy(args[0], args[1]) or ():
                self._copied(target, source)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and (len(args) == 1 or args[1] == 0):
            self._concatenations.add(result, tuple(args[0]))
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(source.untyped_storage().data_ptr())
        parameter = self._targets.get(target.untyped_storage().data_ptr())
        if name is not None and parameter is not None and source.dtype == target.dtype:
            source = source.expand_as(target)
            self.copies.append(LoaderCopy(name, _strided(source), parameter, _strided(target)))


def _strided(view: torch.Tensor) -> Strided:
    return int(view.storage_offset()), tuple(view.shape), tuple(view.stride())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
