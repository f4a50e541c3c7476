"""An engine worker's layout, learned by running its own loader once on tensors without memory worth the name.

Nothing is written: every copy that the loader would make into a parameter is noted instead. A tensor that the loader
changes on the way, or takes from where no box can be told, is named: it goes whole through the loader each time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.errors import PublicationFailed
from millrace.weights.layout import Layout, Place, contiguous
from millrace.weights.loaders import Joined, in_this_thread
from millrace.weights.manifest import Manifest
from millrace.weights.memory import Memory
from millrace.weights.views import Strided, seen, unfolded

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class Watched:
    """What one worker wants of a manifest, and where."""

    memory: Memory
    whole: Mapping[str, torch.Tensor]
    """Buffers of the layout that hold whole tensors for the loader, by name."""
    whole_bytes: int


def watch(
    load: Load, manifest: Manifest, parameters: Mapping[str, torch.Tensor], padded: frozenset[str] = frozenset()
) -> Watched:
    """Runs `load` on every tensor of the manifest, writing nothing. Raises PublicationFailed where it refuses one, and
    where a parameter would keep a value that is never published.

    `parameters` are all of the worker's tensors by name; tied ones may appear under several. `padded` names those that
    are larger than what is published (a vocabulary padded for the kernels).
    """
    watcher = _Watcher(manifest, parameters)
    with torch.no_grad(), in_this_thread(), watcher:
        try:
            load(watcher.tensors())
        except (RuntimeError, ValueError, KeyError, AssertionError, NotImplementedError) as error:
            what = f"the engine's loader refused the manifest: {type(error).__name__}: {error}."
            raise PublicationFailed(what, "see that trainer and engine load the same model folder.") from error
    buffers, places = list(watcher.buffers), list(watcher.places)
    if not watcher.changed and (missing := watcher.unwritten(parameters, padded)):
        what = f"the publication writes nothing to, or only a part of, {', '.join(missing[:5])}."
        raise PublicationFailed(what, "see that trainer and engine load the same model folder.")
    whole = {}
    for i, tensor in enumerate(manifest.tensors):
        if i in watcher.changed:
            device = buffers[0].device if buffers else torch.device("cpu")
            whole[tensor.name] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
            zero = (0,) * len(tensor.shape)
            places.append(Place(i, zero, tensor.shape, len(buffers), 0, contiguous(tensor.shape)))
            buffers.append(whole[tensor.name])
    memory = Memory(manifest, Layout.of(places, manifest), buffers)
    return Watched(memory, whole, sum(t.numel() * t.element_size() for t in whole.values()))


class _Watcher(TorchDispatchMode):
    """Sees every operation of the loader. Views are followed by their storage; a copy into a parameter is noted and not
    made; anything else done with a tensor of the manifest, or read from a parameter's place, counts as a change."""

    def __init__(self, manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.changed: set[int] = set()
        self.buffers: list[torch.Tensor] = []
        self._manifest = manifest
        self._landed: dict[int, list[Place]] = {}
        self._sources: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._joined = Joined()
        self._buffer_of: dict[int, int] = {}
        for parameter in parameters.values():
            storage = parameter.untyped_storage().data_ptr()
            if storage and storage not in self._buffer_of:
                self._buffer_of[storage] = len(self.buffers)
                # From the storage's beginning, where views count from.
                self.buffers.append(parameter.detach().as_strided((1,), (1,), 0))

    @property
    def places(self) -> Iterator[Place]:
        for tensor, landed in self._landed.items():
            if tensor not in self.changed:
                yield from landed

    def unwritten(self, parameters: Mapping[str, torch.Tensor], padded: frozenset[str]) -> list[str]:
        """Names of parameters that the copies do not cover."""
        covered: dict[int, int] = {}
        for buffer, extent in {(p.buffer, p.start, p.strides): p.extent for p in self.places}.items():
            covered[buffer[0]] = covered.get(buffer[0], 0) + torch.Size(extent).numel()
        missing = []
        for name, parameter in parameters.items():
            held = covered.get(self._buffer_of.get(parameter.untyped_storage().data_ptr(), -1), 0)
            if parameter.numel() and (held == 0 or (held < parameter.numel() and name not in padded)):
                missing.append(name)
        return missing

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each with untouched memory of its own, which costs address space only."""
        for i, info in enumerate(self._manifest.tensors):
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="cpu")
            self._sources[tensor.untyped_storage().data_ptr()] = i
            self._kept.append(tensor)
            yield info.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._noted(args[0], args[1]):
            return args[0]
        if func is torch.ops.aten._to_copy.default and self._moved_only(args[0], kwargs or {}):
            return args[0]
        if func is torch.ops.aten.cat.default and (joined := self._join(*args)) is not None:
            return joined
        if not func.is_view:
            for item in (*args, *(kwargs or {}).values()):
                for tensor in item if isinstance(item, list | tuple) else (item,):
                    if isinstance(tensor, torch.Tensor):
                        self.changed.update(self._made_of(tensor))
        return func(*args, **(kwargs or {}))

    def _source(self, tensor: torch.Tensor) -> int | None:
        return self._sources.get(tensor.untyped_storage().data_ptr())

    def _made_of(self, tensor: torch.Tensor) -> set[int]:
        return {source for part in self._joined.parts(tensor) if (source := self._source(part)) is not None}

    def _moved_only(self, tensor: torch.Tensor, asked: Mapping[str, Any]) -> bool:
        """To another device in the same dtype: nothing that the copy into the parameter does not do as well."""
        return bool(self._made_of(tensor)) and asked.get("dtype") in (None, tensor.dtype)

    def _join(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
        """Untouched memory for tensors of the manifest joined along their first dimension, and what lies where in it.
        None for any other."""
        if dim != 0 or len({part.dtype for part in parts}) != 1 or any(self._source(part) is None for part in parts):
            return None
        result = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
        self._joined.add(result, tuple(parts))
        return result

    def _noted(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether this would write to a parameter: it is not done then."""
        buffer = self._buffer_of.get(target.untyped_storage().data_ptr())
        if buffer is None:
            return False
        source = source.expand_as(target)
        copies = self._joined.apart(target, source)
        if copies is None:
            self.changed.update(self._made_of(source))
        for into, part in copies or ():
            self._note(buffer, into, part)
        return True

    def _note(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        if (
            tensor := self._source(source)
        ) is None:  # made from one of the manifest's, which is known to be changed then
            return
        place = self._place(tensor, buffer, _strided(source), _strided(target))
        if place is None or source.dtype != target.dtype:
            self.changed.add(tensor)
        else:
            self._landed.setdefault(tensor, []).append(place)

    def _place(self, tensor: int, buffer: int, source: Strided, target: Strided) -> Place | None:
        shape = self._manifest.tensors[tensor].shape
        source, target = unfolded(shape, source, target)
        box = seen(shape, source)
        if box is None:
            return None
        strides = tuple(0 if dim is None else target[2][dim] for dim in box.along)
        return Place(tensor, box.offset, box.extent, buffer, target[0], strides)


def _strided(view: torch.Tensor) -> Strided:
    return int(view.storage_offset()), tuple(view.shape), tuple(view.stride())
