"""Boxes (rectangular parts) of tensors in safetensors files, one file per rank.

Any number of ranks reads what any other number wrote. The key of a box is the name of its tensor and the box's place in
it, `model.embed_tokens.weight[0:128,0:64]`, so that a file describes itself.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.errors import InvalidState
from services.trainer.checkpoints.copying import write_through
from services.trainer.protocol.local_tensors import NamedTensors, Offset, local_parts

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors."""


def key(name: str, offset: Sequence[int], extent: Sequence[int]) -> str:
    """The key of the box of a tensor that begins at `offset`."""
    return f"{name}[{','.join(f'{first}:{first + size}' for first, size in zip(offset, extent, strict=True))}]"


def keyed_parts(prefix: str, tensors: NamedTensors) -> dict[str, Tensor]:
    """The parts of these tensors that this rank holds, by key. `prefix` is put before each name."""
    return {
        key(f"{prefix}{name}", offset, part.shape): part
        for name, tensor in tensors.items()
        for offset, part in local_parts(tensor).items()
    }


def assign_writers(offers: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """The keys that each rank writes, by rank.

    `offers` are the keys that each rank holds, with their sizes in bytes. Each key is written once, by the rank that
    has least to write among those that hold it.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for name in offer:
            holders[name].append(rank)
    load = [0] * len(offers)
    chosen: list[list[str]] = [[] for _ in offers]
    for name, ranks in sorted(holders.items(), key=lambda item: (len(item[1]), -offers[item[1][0]][item[0]], item[0])):
        rank = min(ranks, key=lambda holder: load[holder])
        chosen[rank].append(name)
        load[rank] += offers[rank][name]
    return chosen


def write(path: Path, boxes: Mapping[str, Tensor]) -> None:
    """Writes a file of these boxes, by key, and waits until it is on the disk. Raises OSError."""
    ordered = sorted(boxes.items(), key=lambda item: -item[1].element_size())  # each aligned to its own size
    header, at = {}, 0
    for name, box in ordered:
        end = at + box.numel() * box.element_size()
        header[name] = {"dtype": DTYPES[box.dtype], "shape": list(box.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        write_through(file, (box for _, box in ordered))


@dataclass(frozen=True)
class _StoredBox:
    """A box in an open file."""

    first: Offset
    end: Offset
    key: str
    file: Any


class BoxReader:
    """Reads boxes of any size and place from the boxes in some files."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises InvalidState if a file cannot be read."""
        self._stored: dict[str, list[_StoredBox]] = defaultdict(list)
        for path in files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InvalidState(f"{path} is damaged: {error}") from error
            names: list[str] = file.keys()
            for name in names:
                tensor, first, end = _parsed(name)
                self._stored[tensor].append(_StoredBox(first, end, name, file))

    @property
    def names(self) -> list[str]:
        """The names of the tensors in the files."""
        return list(self._stored)

    def whole(self, name: str) -> Tensor:
        """A complete tensor, put together from its boxes. Raises InvalidState if a part of it is in no file."""
        boxes = self._stored[name]
        shape = tuple(max(ends) for ends in zip(*(box.end for box in boxes), strict=True))
        found = torch.empty(shape, dtype=_values(boxes[0], boxes[0].first, boxes[0].end).dtype)
        self.fill(name, (0,) * len(shape), found)
        return found

    @torch.no_grad()
    def fill(self, name: str, offset: Offset, part: Tensor) -> None:
        """Reads the box of the tensor `name` that begins at `offset` into `part`. Raises InvalidState if a part of
        it is in no file."""
        covered = torch.zeros(part.shape, dtype=torch.bool)
        for stored in self._stored.get(name, ()):
            low = [max(a, b) for a, b in zip(stored.first, offset, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(stored.end, offset, part.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            part[here].copy_(_values(stored, low, high))
            covered[here] = True
        if not covered.all():
            wanted = key(name, offset, part.shape)
            raise InvalidState(f"{int((~covered).sum())} of the {part.numel()} numbers of {wanted} are in no file.")


def _values(stored: _StoredBox, low: Sequence[int], high: Sequence[int]) -> Tensor:
    if (tuple(low), tuple(high)) == (stored.first, stored.end):
        whole: Tensor = stored.file.get_tensor(stored.key)
        return whole
    inside = tuple(slice(a - f, b - f) for a, b, f in zip(low, high, stored.first, strict=True))
    values: Tensor = stored.file.get_slice(stored.key)[inside]
    return values


def _parsed(name: str) -> tuple[str, Offset, Offset]:
    """The tensor of a key, where the box begins, and where it ends."""
    tensor, _, ranges = name.removesuffix("]").rpartition("[")
    pairs = [tuple(map(int, part.split(":"))) for part in ranges.split(",") if part]
    return tensor, tuple(first for first, _ in pairs), tuple(end for _, end in pairs)
