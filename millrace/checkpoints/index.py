"""The index of a distributed checkpoint: which tensors it has, and in which bytes of which file each part of one is."""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from millrace.errors import refused

FILE = ".metadata"
LATEST = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file in a folder of checkpoints."""
AGAIN = "write or copy the checkpoint again."


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values are."""

    offset: tuple[int, ...]
    """First index of the box in the tensor, in each dimension."""
    extent: tuple[int, ...]
    file: str
    """Path in the checkpoint's folder."""
    start: int
    """First byte."""
    length: int
    """Bytes: those of a file that torch.save wrote."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name: bfloat16."""
    chunks: tuple[Chunk, ...]

    @cached_property
    def _single(self) -> tuple[int, ...]:
        """Dimensions along which each chunk has one element: layers and experts that are stacked."""
        dims = range(len(self.shape))
        return tuple(dim for dim in dims if all(chunk.extent[dim] == 1 for chunk in self.chunks))

    @cached_property
    def _by_single(self) -> Mapping[tuple[int, ...], Sequence[Chunk]]:
        found: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in self.chunks:
            found[tuple(chunk.offset[dim] for dim in self._single)].append(chunk)
        return found

    def chunks_in(self, low: Sequence[int], high: Sequence[int]) -> Iterator[Chunk]:
        """The chunks that overlap the box from `low` to `high`."""
        chunks: Sequence[Chunk] = self.chunks
        if all(high[dim] - low[dim] == 1 for dim in self._single):
            chunks = self._by_single.get(tuple(low[dim] for dim in self._single), ())
        for chunk in chunks:
            dims = zip(low, high, chunk.offset, chunk.extent, strict=True)
            if all(a < first + size and first < b for a, b, first, size in dims):
                yield chunk


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of a checkpoint."""

    folder: Path
    field: str
    """Field of the job spec that names the folder."""
    tensors: Mapping[str, StoredTensor]
    """The tensors by key."""


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder has the index of a distributed checkpoint."""
    return (folder / FILE).is_file()


def read_index(folder: Path, field: str) -> CheckpointIndex:
    """Reads the index and looks whether the files are there that it names. Raises InvalidJob that names `field`."""
    if not is_checkpoint(folder):
        raise refused(field, str(folder), *_no_checkpoint(folder))
    try:
        metadata = read_pickle(folder / FILE)
    except (OSError, ValueError) as error:
        raise refused(field, str(folder), f"{FILE} cannot be read: {error}", AGAIN) from error
    try:
        tensors = dict(_tensors(metadata))
    except _BadIndex as error:
        raise refused(field, str(folder), str(error), error.fix) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise refused(field, str(folder), f"{FILE} is not an index of torch's format ({error})", AGAIN) from error
    _check_files(folder, field, tensors)
    return CheckpointIndex(folder, field, tensors)


class _BadIndex(Exception):
    """The index names what cannot be read."""

    def __init__(self, reason: str, fix: str = AGAIN) -> None:
        super().__init__(reason)
        self.fix = fix


def _no_checkpoint(folder: Path) -> tuple[str, str]:
    """Why a folder is no checkpoint, and what to do."""
    if not folder.is_dir():
        return (
            f"there is no folder {folder.absolute()}",
            "give the folder of a checkpoint that every trainer host sees.",
        )
    if (folder / LATEST).is_file():
        inside = sorted(path.name for path in folder.iterdir() if is_checkpoint(path))
        example = inside[-1] if inside else "iter_0000100"
        return "is a folder of Megatron's checkpoints, not one of them", f"name one: {folder / example}."
    fix = "give a folder of torch's distributed checkpoint or of Megatron-Core's torch_dist format."
    return f"has no {FILE}, so it is not a distributed checkpoint, or it was not written completely", fix


def _tensors(metadata: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Raises _BadIndex, and AttributeError, TypeError or ValueError for an index of another form."""
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for entry, place in metadata.storage_data.items():
        places[entry.fqn, tuple(getattr(entry, "offset", None) or ())] = place
    for key, stored in metadata.state_dict_metadata.items():
        if not hasattr(stored, "chunks"):
            continue  # an object, not a tensor
        state = getattr(stored.properties, "state", None)
        dtype = state[0] if state else stored.properties.dtype
        chunks = tuple(_chunk(key, chunk, places) for chunk in stored.chunks)
        yield str(key), StoredTensor(str(key), tuple(stored.size), str(dtype), chunks)


def _chunk(key: str, chunk: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    offset, extent = tuple(chunk.offsets), tuple(chunk.sizes)
    place = places.get((key, offset), places.get((key, ())))
    if place is None:
        raise _BadIndex(f"its index does not say where {key} is from {list(offset)} on")
    if getattr(place, "transform_descriptors", None):
        raise _BadIndex(f"{key} is stored compressed or encrypted", "write the checkpoint without extensions.")
    path = PurePosixPath(place.relative_path)
    if path.is_absolute() or ".." in path.parts:
        raise _BadIndex(f"its index says that {key} is in {path}, outside of the folder")
    return Chunk(offset, extent, str(path), int(place.offset), int(place.length))


def _check_files(folder: Path, field: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises InvalidJob if a file is missing or too short."""
    ends: dict[str, tuple[int, str]] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, (0, "")), (chunk.start + chunk.length, tensor.key))
    missing = sorted(name for name in ends if not (folder / name).is_file())
    if missing:
        first = ends[missing[0]][1]
        reason = f"{len(missing)} of its {len(ends)} files are missing: {', '.join(missing[:3])}, with parts of {first}"
        raise refused(field, str(folder), reason, "finish the copy or the download.")
    for name, (end, key) in sorted(ends.items()):
        if (size := (folder / name).stat().st_size) < end:
            reason = f"{name} has {size} bytes, and {key} ends at byte {end}"
            raise refused(field, str(folder), reason, "finish the copy or the download.")


@dataclass(frozen=True)
class Part:
    """A box of a tensor of the model that is a box of a stored tensor."""

    key: str
    """The stored tensor."""
    offset: tuple[int, ...]
    """First index of the box in the model's tensor."""
    extent: tuple[int, ...]
    """Size of the box, in the dimensions of the model's tensor."""
    stored: tuple[int, ...]
    """First index of the box in the stored tensor."""
    along: tuple[int | None, ...]
    """For each dimension of the stored tensor, the dimension of the model's tensor that runs along it; None if the
    box has one element there."""


@dataclass(frozen=True)
class Located:
    """A tensor of the model."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype in which it is stored."""
    parts: tuple[Part, ...]


KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}
"""Classes whose values are needed as such."""


class Record:
    """An object of a class that was not imported. Its attributes are those of the pickled object."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})
        else:
            self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a dictionary of an unknown class are not needed."""

    def append(self, value: Any) -> None:
        """Nor are those of a list."""

    def extend(self, values: Any) -> None:
        """See `append`."""


class _Inert(pickle.Unpickler):
    """Imports no class and no function that a pickle names. The index of a distributed checkpoint is a pickle of
    dataclasses of torch and Megatron: each is replaced by a class that keeps the values that it is given, and can do
    nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        return name if module == "torch" else Record  # torch's dtypes are such names: float32


def read_pickle(path: Path) -> Any:
    """The pickled object, with a `Record` for each object of an unknown class, and the name for each dtype. Raises
    OSError, and ValueError for what is not a pickle."""
    with path.open("rb") as file:
        try:
            return _Inert(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"is not an index of torch's distributed checkpoints ({error})") from error
