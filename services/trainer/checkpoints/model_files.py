"""Reads the weights of a model, tensor by tensor, under the names of its Hugging Face folder. Quantized tensors are
read as unquantized ones, and their scales are hidden. Tensors that a backend does not read are accounted for."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Protocol

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.checkpoints.source import FIELD as WEIGHTS_FIELD
from millrace.checkpoints.source import checkpoint_folder
from millrace.data.model_folder import FIELD
from millrace.data.quantization import SCALES, BlockScales, block_scales
from millrace.errors import InvalidJob, refused
from millrace.weights.folder_tensors import Unread, other_values
from services.trainer.checkpoints.foreign.files import CheckpointFiles

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTIZED = ("F8", "F6", "F4")
"""Beginnings of the names that safetensors has for dtypes of less than 16 bits."""
BLOCK_SCALED = "F8_E4M3"
ROWS = 4096
"""Rows of two tensors that are compared at a time."""
log = structlog.get_logger(__name__)


class Source(Protocol):
    """Where the tensors of a model folder are stored."""

    def names(self) -> Iterator[str]:
        """The names of the tensors, in an order in which they are read fast."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def stored(self, name: str) -> Any:
        """A safetensors slice of the tensor, or what has its interface."""

    def whole(self, name: str) -> Tensor:
        """A complete tensor, in host memory."""

    def close(self) -> None:
        """Closes the files."""


class ModelFiles:
    """The weights of a model folder: its safetensors files, or a distributed checkpoint (see
    `millrace.checkpoints.source`). Each file is opened when it is first needed and closed with the context."""

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        """`weights` is the checkpoint with the weights, where they are not in the folder. Raises InvalidJob if the
        weights cannot be read."""
        checkpoint = checkpoint_folder(folder, weights)
        self._folder = checkpoint or folder
        self._field = FIELD if weights is None else WEIGHTS_FIELD
        self._source: Source = (
            SafetensorsFiles(folder) if checkpoint is None else CheckpointFiles(folder, checkpoint, self._field)
        )
        config = folder / "config.json"
        self.blocks = block_scales(json.loads(config.read_text()) if config.is_file() else {}, folder)
        """The format of the quantized tensors; None if there are none."""

    def __enter__(self) -> "ModelFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.close()

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors, file after file."""
        return filter(self.has, self._source.names())

    def has(self, name: str) -> bool:
        """Whether the folder has a tensor of this name."""
        return name in self._source and not self._is_scale(name)

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is read as another one than is stored."""
        return isinstance(self.tensor(name), BlockScaledTensor)

    def whole(self, name: str) -> Tensor:
        """A complete tensor, in host memory. A quantized tensor comes as float32. Raises InvalidJob if it cannot be
        read."""
        stored = self.tensor(name)
        return stored[...] if isinstance(stored, BlockScaledTensor) else self._source.whole(name)

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """A safetensors slice of the tensor: indexing it reads the values, those of a quantized tensor as float32.
        Raises InvalidJob if the tensor is missing or has another shape."""
        if not self.has(name):
            raise InvalidJob(
                f"{self._field}: {self._folder} has no tensor {name}, of shape {shape}, which its config asks for.",
                "give a folder whose weights fit its config.json.",
            )
        stored = self.tensor(name)
        if tuple(stored.get_shape()) != shape:
            raise InvalidJob(
                f"{self._field}: {name} in {self._folder} is {tuple(stored.get_shape())}, the config asks for {shape}.",
                "give a folder whose weights fit its config.json.",
            )
        return stored

    def tensor(self, name: str) -> Any:
        """A safetensors slice of the tensor whatever its shape, as `slice_of`. Raises InvalidJob if it cannot be
        read."""
        stored = self._source.stored(name)
        dtype: str = stored.get_dtype()
        if not dtype.startswith(QUANTIZED):
            return stored
        scales = name + SCALES
        if dtype != BLOCK_SCALED or self.blocks is None or scales not in self._source:
            reason = f"{name} in {self._folder} is {dtype} without scales that are known"
            raise InvalidJob(
                f"{self._field}: {reason}.", "give a folder with unquantized weights, or DeepSeek's format."
            )
        try:
            return BlockScaledTensor(stored, self._source.stored(scales), self.blocks)
        except ValueError as error:
            what = f"{self._field}: {name} in {self._folder} has {error}."
            raise InvalidJob(what, "give a folder whose weights fit its config.json.") from error

    def check(self) -> None:
        """Raises InvalidJob if a tensor is quantized in a way that cannot be read."""
        for name in self:
            self.tensor(name)

    def _is_scale(self, name: str) -> bool:
        return self.blocks is not None and name.endswith(SCALES) and name.removesuffix(SCALES) in self._source


class SafetensorsFiles:
    """Implements `Source` with the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidJob if the weights cannot be read."""
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = _index(folder)

    def names(self) -> Iterator[str]:
        return iter(sorted(self._file_of, key=lambda name: (self._file_of[name], name)))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def stored(self, name: str) -> Any:
        return self._file(self._file_of[name]).get_slice(name)

    def whole(self, name: str) -> Tensor:
        tensor: Tensor = self._file(self._file_of[name]).get_tensor(name)
        return tensor

    def close(self) -> None:
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(_opened(self._folder / name))
        return self._open[name]


def readable(folder: Path, weights: Path | None = None) -> bool:
    """Whether `ModelFiles` reads the folder: it has safetensors, or there is a distributed checkpoint."""
    found = any((folder / file).is_file() for file in (INDEX, SINGLE))
    return found or checkpoint_folder(folder, weights) is not None


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        fix = "give a Hugging Face folder with safetensors that every trainer host sees at this path."
        raise InvalidJob(f"model.path: {path} cannot be read: {error}.", fix) from error


def _index(folder: Path) -> dict[str, str]:
    """Tensor name → file name."""
    index = folder / INDEX
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    with _opened(folder / SINGLE) as file:
        return dict.fromkeys(file.keys(), SINGLE)


CRITIC_FIELD = "algorithm.critic.path"
WEIGHT, BIAS = "score.weight", "score.bias"


def stored_head(folder: Path, hidden: int) -> Tensor | None:
    """The weight of the folder's head, [1, hidden]; None if the folder has no head. Raises InvalidJob if its head
    is not one of a critic."""
    found: dict[str, Tensor] = {}
    if readable(folder):
        with ModelFiles(folder) as files:
            found = {name: files.whole(name) for name in (WEIGHT, BIAS) if files.has(name)}
    weight = found.get(WEIGHT)
    if weight is not None and weight.shape != (1, hidden):
        reason = f"its {WEIGHT} is {tuple(weight.shape)}, not {(1, hidden)}: a critic says one number"
        raise refused(CRITIC_FIELD, str(folder), reason, "give a model with one label, or one without a head.")
    if BIAS in found and bool(torch.count_nonzero(found[BIAS])):
        fix = "give a model whose head has none, or one without a head."
        raise refused(CRITIC_FIELD, str(folder), f"its {BIAS} is not 0, and the critic's head has no bias", fix)
    return weight


def config_changes(architectures: list[str]) -> dict[str, object]:
    """The entries in which the config.json of a critic's folder differs from that of its language model."""
    return {
        "architectures": [name.replace("ForCausalLM", "ForTokenClassification") for name in architectures],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "tie_word_embeddings": False,
    }


Index = EllipsisType | slice | tuple[slice, ...]


class BlockScaledTensor:
    """Each element times the factor of its block. Blocks divide the last two dimensions.

    It has the interface of a safetensors slice: indexing it reads only what is asked for, and the factors of the blocks
    that this touches.
    """

    def __init__(self, stored: Any, scales: Any, blocks: BlockScales) -> None:
        """`stored` and `scales` are safetensors slices of float8 elements and of factors. Raises ValueError if there
        is not one factor for each block."""
        self.shape = tuple(stored.get_shape())
        self._stored = stored
        self._scales = scales
        self._sizes = (*(1 for _ in self.shape[2:]), blocks.rows, blocks.columns)
        found = tuple(scales.get_shape())
        wanted = tuple(-(-n // size) for n, size in zip(self.shape, self._sizes, strict=True))
        if found != wanted:
            raise ValueError(f"scales of shape {found} for blocks of {blocks.rows} × {blocks.columns}, not {wanted}")

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Index) -> Tensor:
        """The elements in a box, float32. `index` has a slice with step 1 for each of the first dimensions."""
        given = () if index is ... else index if isinstance(index, tuple) else (index,)
        asked = [*given, *(slice(None) for _ in self.shape[len(given) :])]
        box = [slice(*part.indices(n)[:2]) for part, n in zip(asked, self.shape, strict=True)]
        if any(part.start >= part.stop for part in box):
            return torch.empty([max(0, part.stop - part.start) for part in box])
        touched = [
            slice(part.start // size, (part.stop - 1) // size + 1) for part, size in zip(box, self._sizes, strict=True)
        ]
        values: Tensor = self._stored[tuple(box)].to(torch.float32)
        return _scaled(values, self._scales[tuple(touched)].to(torch.float32), box[-2:], self._sizes[-2:])


def _scaled(values: Tensor, scales: Tensor, box: list[slice], sizes: tuple[int, ...]) -> Tensor:
    """Multiplies `values`, a box of rows and columns, by the factors of the blocks that it touches, in place."""
    rows, columns = box
    first_row, first_column = rows.start // sizes[0], columns.start // sizes[1]
    wide = scales.index_select(-1, torch.arange(columns.start, columns.stop) // sizes[1] - first_column)
    for number in range(wide.shape[-2]):  # one row of blocks at a time: no second tensor of the size of `values`
        begin = max(rows.start, (first_row + number) * sizes[0]) - rows.start
        end = min(rows.stop, (first_row + number + 1) * sizes[0]) - rows.start
        values[..., begin:end, :].mul_(wide[..., number : number + 1, :])
    return values


def check_unread(unread: Unread, files: ModelFiles, folder: Path, place: str, *, by_value: bool) -> None:
    """Raises InvalidJob if tensors of `files` with values of their own would be lost; `place` as in `Unread.check`.
    `by_value`: also reads tied tensors, and tells what is left out."""
    unread.check(place)
    for name, source in unread.copies:
        one, other = files.tensor(name), files.tensor(source)
        if tuple(one.get_shape()) != tuple(other.get_shape()) or (by_value and not _equal(one, other)):
            raise other_values(place, name, source)
    if unread.ahead and by_value:
        warning = "tensors that predict several tokens at once are not trained, and left out of what is saved"
        log.warning(warning, folder=str(folder), tensors=len(unread.ahead), first=unread.ahead[0])


def _equal(one: Any, other: Any) -> bool:
    """Whether two safetensors slices of one shape have the same values."""
    rows = one.get_shape()[0] if one.get_shape() else 1
    if not one.get_shape():
        return torch.equal(_values(one, ...), _values(other, ...))
    starts = range(0, rows, ROWS)
    return all(torch.equal(_values(one, slice(at, at + ROWS)), _values(other, slice(at, at + ROWS))) for at in starts)


def _values(stored: Any, index: Any) -> Tensor:
    values: Tensor = stored[index]
    return values.float()
