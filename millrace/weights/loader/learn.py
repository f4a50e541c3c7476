"""An engine worker's layout, learned by running the engine's own loader once on tensors whose memory is never touched.

Nothing is written: a copy to a parameter is recorded instead of made. A tensor goes whole through the loader with each
version if the loader changes it on the way, takes a part of it that is no box, or puts it where it also writes in
another way than by copying.
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
from millrace.weights.loader.misfits import loader_refused, parameters_unwritten
from millrace.weights.loader.patches import Concatenations, pools_run_inline
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.views import Strided, covered_elements, split_merged_dims, viewed_box

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
COPY = torch.ops.aten.copy_.default
FILLS = frozenset({torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, COPY})
"""Operations that write the same values whenever they are repeated with the same arguments."""


@dataclass(frozen=True)
class LearnedLayout:
    """Which boxes of a manifest one worker wants, and where they lie in its memory."""

    memory: Memory
    loader_tensors: Mapping[str, torch.Tensor]
    """Buffers of the layout for the tensors that go whole through the loader, by name."""
    loader_bytes: int
    """Size of these buffers together."""
    constant_writes: Sequence[Callable[[], Any]]
    """What the loader writes besides published values, as zeros behind a padded vocabulary. They are repeated with each
    version, before the loader takes `loader_tensors`."""
    untaken: tuple[int, ...] = ()
    """Tensors of the manifest of which nothing reached this worker's parameters."""


def learn_layout(
    load: Load, manifest: Manifest, parameters: Mapping[str, torch.Tensor], padded: frozenset[str] = frozenset()
) -> LearnedLayout:
    """Runs `load` on every tensor of the manifest, writing nothing. Raises InvalidJob if `load` refuses one, and
    if a parameter would keep a value that is never published.

    `parameters` are all of the worker's tensors by name; tied ones may appear under several. `padded` names those that
    are larger than what is published (a vocabulary padded for the kernels).
    """
    recorder = _LoaderRecorder(manifest, parameters)
    with torch.no_grad(), pools_run_inline(), recorder:
        try:
            load(recorder.tensors())
        except torch.OutOfMemoryError as error:
            raise PublicationFailed(f"the engine's loader has no memory: {error}.", "give the engine less.") from error
        except (RuntimeError, ValueError, KeyError, AssertionError, NotImplementedError) as error:
            raise loader_refused(error) from error
    constant_writes = recorder.settle()
    buffers, places = list(recorder.buffers), list(recorder.places)
    if missing := recorder.unwritten(parameters, padded):
        raise parameters_unwritten(missing)
    loader_tensors: dict[str, torch.Tensor] = {}
    for i, tensor in enumerate(manifest.tensors):
        if i in recorder.changed:
            device = buffers[0].device if buffers else torch.device("cpu")
            loader_tensors[tensor.name] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
            zero = (0,) * len(tensor.shape)
            places.append(Place(i, zero, tensor.shape, len(buffers), 0, row_major_strides(tensor.shape)))
            buffers.append(loader_tensors[tensor.name])
    memory = Memory(manifest, Layout.of(places, manifest), buffers)
    size = sum(tensor.nbytes for tensor in loader_tensors.values())
    untaken = tuple(i for i in range(len(manifest.tensors)) if i not in recorder.taken)
    return LearnedLayout(memory, loader_tensors, size, constant_writes, untaken)


class _Origin(IntEnum):
    """What a tensor was computed from; of several things, the one with the largest value."""

    CONSTANT = 0
    PARAMETER = 1
    MANIFEST = 2


class _LoaderRecorder(TorchDispatchMode):
    """Sees every operation of the loader. Views are recognised by their storage. A copy of a manifest tensor to a
    parameter is recorded and not made; any other operation on a manifest tensor counts as a change of it."""

    def __init__(self, manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.changed: set[int] = set()
        self.taken: set[int] = set()
        """Tensors that reached a parameter, as they are or after a change."""
        self.buffers: list[torch.Tensor] = []
        self._manifest = manifest
        self._places_of: dict[int, list[Place]] = {}
        # Views in bytes, keyed by buffer.
        self._copied: dict[int, set[Strided]] = defaultdict(set)
        self._filled: dict[int, set[Strided]] = defaultdict(set)
        self._fills: list[tuple[int, Callable[[], Any]]] = []
        self._unrecordable: set[int] = set()
        """Buffers that the loader also writes in a way that cannot be recorded."""
        self._sources: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._concatenations = Concatenations()
        self._origins: dict[StorageWeakRef, _Origin] = {}
        self._made_from: dict[StorageWeakRef, frozenset[int]] = {}
        """The manifest tensors from which other tensors were computed."""
        self._buffer_of: dict[int, int] = {}
        for parameter in parameters.values():
            storage = parameter.untyped_storage().data_ptr()
            if storage and storage not in self._buffer_of:
                self._buffer_of[storage] = len(self.buffers)
                # From the storage's beginning, where views count from.
                self.buffers.append(parameter.detach().as_strided((1,), (1,), 0))

    @property
    def places(self) -> Iterator[Place]:
        for tensor, places in self._places_of.items():
            if tensor not in self.changed:
                yield from places

    def settle(self) -> list[Callable[[], Any]]:
        """Called when the loader has ended: the constant writes that no copy overlaps. Tensors that are copied to
        buffers with other writes will go whole through the loader."""
        overlapping = {buffer for buffer in self._filled if self._overlap(buffer)}
        self._unrecordable |= overlapping
        for tensor, places in self._places_of.items():
            if any(place.buffer in self._unrecordable for place in places):
                self.changed.add(tensor)
        return [fill for buffer, fill in self._fills if buffer not in overlapping]

    def _overlap(self, buffer: int) -> bool:
        """Whether a constant write and a copy write the same element."""
        copied, filled = self._copied[buffer], self._filled[buffer]
        return covered_elements(copied | filled) != covered_elements(copied) + covered_elements(filled)

    def unwritten(self, parameters: Mapping[str, torch.Tensor], padded: frozenset[str]) -> list[str]:
        """Names of parameters that copies and fills do not cover."""
        covered = {
            buffer: covered_elements(self._copied[buffer] | self._filled[buffer]) for buffer in range(len(self.buffers))
        }
        missing = []
        for name, parameter in parameters.items():
            buffer = self._buffer_of.get(parameter.untyped_storage().data_ptr(), -1)
            held, size = covered.get(buffer, 0), parameter.numel() * parameter.element_size()
            if size and buffer not in self._unrecordable and (held == 0 or (held < size and name not in padded)):
                missing.append(name)
        return missing

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The manifest's tensors by name, each with memory that is never touched: it costs address space only."""
        for i, info in enumerate(self._manifest.tensors):
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="cpu")
            self._sources[tensor.untyped_storage().data_ptr()] = i
            self._kept.append(tensor)
            yield info.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY and self._record_copy(args[0], args[1]):
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
            self.changed.update(self._manifest_tensors_in(tensor))
        if into := {buffer for tensor in written if (buffer := self._buffer(tensor)) is not None}:
            others = [self._origin(tensor) for tensor in given if tensor is not written[0]]
            if func in FILLS and max(others, default=_Origin.CONSTANT) is _Origin.CONSTANT:
                (buffer,) = into
                self._filled[buffer].add(_in_bytes(written[0]))
                self._fills.append((buffer, functools.partial(func, *args, **kwargs)))
            elif func is not COPY:
                self._unrecordable |= into
                self.taken |= self._behind(given)
            return written[0] if func._schema.returns else None
        result = func(*args, **kwargs)
        origin = max((self._origin(tensor) for tensor in given), default=_Origin.CONSTANT)
        behind = self._behind(given)
        for tensor in (*written, *_tensors((result,))):
            storage = StorageWeakRef(tensor.untyped_storage())
            self._origins[storage] = origin
            self._made_from[storage] = behind
        return result

    def _behind(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """The manifest tensors that are among `tensors`, or from which these were computed."""
        found: set[int] = set()
        for tensor in tensors:
            found |= self._manifest_tensors_in(tensor)
            found |= self._made_from.get(StorageWeakRef(tensor.untyped_storage()), frozenset())
        return frozenset(found)

    def _origin(self, tensor: torch.Tensor) -> _Origin:
        if self._manifest_tensors_in(tensor):
            return _Origin.MANIFEST
        if self._buffer(tensor) is not None:
            return _Origin.PARAMETER
        return self._origins.get(StorageWeakRef(tensor.untyped_storage()), _Origin.CONSTANT)

    def _buffer(self, tensor: torch.Tensor) -> int | None:
        """Number of the buffer of the parameter that the tensor lies in; None outside all parameters."""
        return self._buffer_of.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _source(self, tensor: torch.Tensor) -> int | None:
        return self._sources.get(tensor.untyped_storage().data_ptr())

    def _manifest_tensors_in(self, tensor: torch.Tensor) -> set[int]:
        return {source for part in self._concatenations.parts(tensor) if (source := self._source(part)) is not None}

    def _moved_only(self, tensor: torch.Tensor, asked: Mapping[str, Any]) -> bool:
        """Whether a manifest tensor is only moved to another device: the copy to the parameter does that as well."""
        return bool(self._manifest_tensors_in(tensor)) and asked.get("dtype") in (None, tensor.dtype)

    def _join(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
        """Untouched memory for manifest tensors that are concatenated along their first dimension; None for others."""
        if dim != 0 or len({part.dtype for part in parts}) != 1 or any(self._source(part) is None for part in parts):
            return None
        result = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
        self._concatenations.add(result, tuple(parts))
        return result

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Records a copy of something published to a parameter. False for any other copy."""
        buffer = self._buffer(target)
        if buffer is None:
            return False
        source = source.expand_as(target)
        if self._origin(source) is not _Origin.MANIFEST:
            return False
        self._copied[buffer].add(_in_bytes(target))
        self.taken |= self._behind([source])
        copies = self._concatenations.split_copy(target, source)
        if copies is None:
            self.changed.update(self._manifest_tensors_in(source))
        for into, part in copies or ():
            self._record_part(buffer, into, part)
        return True

    def _record_part(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        if (tensor := self._source(source)) is None:
            return  # made from a manifest tensor, which is in `changed` already
        place = self._place(tensor, buffer, strided(source), strided(target))
        if place is None or source.dtype != target.dtype:
            self.changed.add(tensor)
        else:
            self._places_of.setdefault(tensor, []).append(place)

    def _place(self, tensor: int, buffer: int, source: Strided, target: Strided) -> Place | None:
        shape = self._manifest.tensors[tensor].shape
        source, target = split_merged_dims(shape, source, target)
        box = viewed_box(shape, source)
        if box is None:
            return None
        strides = tuple(0 if dim is None else target[2][dim] for dim in box.along)
        return Place(tensor, box.offset, box.extent, buffer, target[0], strides)


def strided(view: torch.Tensor) -> Strided:
    """The offset, shape and strides of a view, in elements of its storage."""
    return int(view.storage_offset()), tuple(view.shape), tuple(view.stride())


def _in_bytes(view: torch.Tensor) -> Strided:
    """The view in bytes, so that views of different dtypes can be compared."""
    start, extents, strides = strided(view)
    size = view.element_size()
    return start * size, (*extents, size), (*(stride * size for stride in strides), 1)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors among the values and in lists among them."""
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
