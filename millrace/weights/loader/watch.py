"""An engine worker's layout, learned by running its own loader once on tensors without memory worth the name.

Nothing is written: whatever the loader would write to a parameter is noted instead. A tensor that the loader changes on
the way, takes from where no box can be told, or puts where it also writes otherwise than by copying, is named: it goes
whole through the loader each time.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.errors import PublicationFailed
from millrace.weights.loader.patches import Joined, in_this_thread
from millrace.weights.plans.coverage import covered_elements
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.views import Strided, split_merged_dims, viewed_box

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
COPY = torch.ops.aten.copy_.default
FILLS = frozenset({torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, COPY})
"""Operations that write the same however often they are done, if what they take stays the same."""


@dataclass(frozen=True)
class Watched:
    """What one worker wants of a manifest, and where."""

    memory: Memory
    whole: Mapping[str, torch.Tensor]
    """Buffers of the layout that hold whole tensors for the loader, by name."""
    whole_bytes: int
    fills: Sequence[Callable[[], Any]]
    """What the loader writes beside all that is published, as zeros behind a padded vocabulary: to be done with each
    version, before the loader takes what goes whole through it."""


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
    fills = watcher.settle()
    buffers, places = list(watcher.buffers), list(watcher.places)
    if missing := watcher.unwritten(parameters, padded):
        what = f"the publication writes nothing to, or only a part of, {', '.join(missing[:5])}."
        raise PublicationFailed(what, "see that trainer and engine load the same model folder.")
    whole = {}
    for i, tensor in enumerate(manifest.tensors):
        if i in watcher.changed:
            device = buffers[0].device if buffers else torch.device("cpu")
            whole[tensor.name] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
            zero = (0,) * len(tensor.shape)
            places.append(Place(i, zero, tensor.shape, len(buffers), 0, row_major_strides(tensor.shape)))
            buffers.append(whole[tensor.name])
    memory = Memory(manifest, Layout.of(places, manifest), buffers)
    return Watched(memory, whole, sum(t.numel() * t.element_size() for t in whole.values()), fills)


class _Origin(IntEnum):
    """What a tensor was made of; of several things, the last one here."""

    CONSTANT = 0
    PARAMETER = 1
    MANIFEST = 2


class _Watcher(TorchDispatchMode):
    """Sees every operation of the loader. Views are followed by their storage; a write to a parameter is noted and not
    made; anything but a copy that is done with a tensor of the manifest, or read from a parameter's place, counts as a
    change."""

    def __init__(self, manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.changed: set[int] = set()
        self.buffers: list[torch.Tensor] = []
        self._manifest = manifest
        self._landed: dict[int, list[Place]] = {}
        # By buffer, in bytes.
        self._copied: dict[int, set[Strided]] = defaultdict(set)
        self._filled: dict[int, set[Strided]] = defaultdict(set)
        self._fills: list[tuple[int, Callable[[], Any]]] = []
        self._otherwise: set[int] = set()
        """Buffers of which nobody can tell what is written there."""
        self._sources: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._joined = Joined()
        self._origins: dict[StorageWeakRef, _Origin] = {}
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

    def settle(self) -> list[Callable[[], Any]]:
        """Once everything was seen: the fills that no copy meets. What lands where others are made goes whole through
        the loader."""
        met = {buffer for buffer in self._filled if not self._beside(buffer)}
        self._otherwise |= met
        for tensor, landed in self._landed.items():
            if any(place.buffer in self._otherwise for place in landed):
                self.changed.add(tensor)
        return [fill for buffer, fill in self._fills if buffer not in met]

    def _beside(self, buffer: int) -> bool:
        copied, filled = self._copied[buffer], self._filled[buffer]
        return covered_elements(copied | filled) == covered_elements(copied) + covered_elements(filled)

    def unwritten(self, parameters: Mapping[str, torch.Tensor], padded: frozenset[str]) -> list[str]:
        """Names of parameters that copies and fills do not cover."""
        covered = {
            buffer: covered_elements(self._copied[buffer] | self._filled[buffer]) for buffer in range(len(self.buffers))
        }
        missing = []
        for name, parameter in parameters.items():
            buffer = self._buffer_of.get(parameter.untyped_storage().data_ptr(), -1)
            held, size = covered.get(buffer, 0), parameter.numel() * parameter.element_size()
            if size and buffer not in self._otherwise and (held == 0 or (held < size and name not in padded)):
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
        if func is COPY and self._noted(args[0], args[1]):
            return args[0]
        if func is torch.ops.aten._to_copy.default and self._moved_only(args[0], kwargs or {}):
            return args[0]
        if func is torch.ops.aten.cat.default and (joined := self._join(*args)) is not None:
            return joined
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        given, written = _tensors((*args, *kwargs.values())), _written_by(func, args, kwargs)
        for tensor in given:
            self.changed.update(self._made_of(tensor))
        if into := {buffer for tensor in written if (buffer := self._buffer(tensor)) is not None}:
            others = [self._origin(tensor) for tensor in given if tensor is not written[0]]
            if func in FILLS and max(others, default=_Origin.CONSTANT) is _Origin.CONSTANT:
                (buffer,) = into
                self._filled[buffer].add(_in_bytes(written[0]))
                self._fills.append((buffer, functools.partial(func, *args, **kwargs)))
            elif func is not COPY:
                self._otherwise |= into
            return written[0] if func._schema.returns else None
        result = func(*args, **kwargs)
        origin = max((self._origin(tensor) for tensor in given), default=_Origin.CONSTANT)
        for tensor in (*written, *_tensors((result,))):
            self._origins[StorageWeakRef(tensor.untyped_storage())] = origin
        return result

    def _origin(self, tensor: torch.Tensor) -> _Origin:
        if self._made_of(tensor):
            return _Origin.MANIFEST
        if self._buffer(tensor) is not None:
            return _Origin.PARAMETER
        return self._origins.get(StorageWeakRef(tensor.untyped_storage()), _Origin.CONSTANT)

    def _buffer(self, tensor: torch.Tensor) -> int | None:
        """Of the parameter that it lies in."""
        return self._buffer_of.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

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
        """Whether this would write something published to a parameter: it is not done then."""
        buffer = self._buffer(target)
        if buffer is None:
            return False
        source = source.expand_as(target)
        if self._origin(source) is not _Origin.MANIFEST:
            return False
        self._copied[buffer].add(_in_bytes(target))
        copies = self._joined.apart(target, source)
        if copies is None:
            self.changed.update(self._made_of(source))
        for into, part in copies or ():
            self._note(buffer, into, part)
        return True

    def _note(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        if (tensor := self._source(source)) is None:
            return  # made from one of the manifest's, which is known to be changed then
        place = self._place(tensor, buffer, _strided(source), _strided(target))
        if place is None or source.dtype != target.dtype:
            self.changed.add(tensor)
        else:
            self._landed.setdefault(tensor, []).append(place)

    def _place(self, tensor: int, buffer: int, source: Strided, target: Strided) -> Place | None:
        shape = self._manifest.tensors[tensor].shape
        source, target = split_merged_dims(shape, source, target)
        box = viewed_box(shape, source)
        if box is None:
            return None
        strides = tuple(0 if dim is None else target[2][dim] for dim in box.along)
        return Place(tensor, box.offset, box.extent, buffer, target[0], strides)


def _strided(view: torch.Tensor) -> Strided:
    return int(view.storage_offset()), tuple(view.shape), tuple(view.stride())


def _in_bytes(view: torch.Tensor) -> Strided:
    """Whichever dtype the view has."""
    start, extents, strides = _strided(view)
    size = view.element_size()
    return start * size, (*extents, size), (*(stride * size for stride in strides), 1)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those given alone and those given in lists."""
    items = (item for value in values for item in (value if isinstance(value, list | tuple) else (value,)))
    return [item for item in items if isinstance(item, torch.Tensor)]


def _written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors to whose memory an operation writes."""
    if torch.Tag.inplace_view in func.tags:
        return []
    arguments = func._schema.arguments
    given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    return _tensors(value for name, value in given.items() if name in written)
