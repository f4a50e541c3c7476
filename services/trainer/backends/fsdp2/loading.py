"""Fills a sharded module from a model folder. Each rank reads from the safetensors only the boxes that it holds; a
folder that transformers has to convert is read whole by rank 0."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from millrace.checkpoints.source import checkpoint_folder
from millrace.data import quantization
from millrace.errors import InvalidJob
from millrace.spec.model import Model
from millrace.weights.folder_tensors import Unread, inside, other_values
from millrace.weights.loader.stored import stored_boxes, stored_tensors
from millrace.weights.plans.views import ViewedBox
from services.trainer.backends.fsdp2.adapted import BASE
from services.trainer.checkpoints.huggingface import layer_count
from services.trainer.checkpoints.model_files import ModelFiles, check_unread, readable
from services.trainer.protocol.adapter import is_adapter
from services.trainer.ranks import collectives

FIX = "give a model of an architecture that this release of transformers knows, or install a newer one."


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder, and how transformers builds the model of it."""

    loader: Any
    """AutoModelForCausalLM, or AutoModel for a model without its head."""
    model: Model
    config: Any
    dtype: torch.dtype
    """Dtype of the module's parameters."""
    field: str
    """Field of the job spec that names the folder."""

    @property
    def _weights(self) -> Path | None:
        return None if self.model.weights is None else Path(self.model.weights)

    @property
    def _place(self) -> str:
        """The field of the job spec that names the weights, and its value."""
        return f"{self.field}: {self.model.path}" if self._weights is None else f"model.weights: {self._weights}"

    def buffers(self, module: PreTrainedModel) -> dict[str, Tensor] | None:
        """The buffers that are in no file, for a module on the meta device; None if the whole model is needed to
        know them."""
        if not readable(Path(self.model.path), self._weights):
            return None
        try:
            return computed_buffers(module)
        except (NotImplementedError, RuntimeError):
            return None

    def fill(self, module: PreTrainedModel, mesh: DeviceMesh, buffers: dict[str, Tensor] | None) -> None:
        """Fills the sharded module. A collective.

        Each rank reads the boxes that it holds. Where transformers has to convert the folder, rank 0 reads all of it
        into host memory, and sends it tensor by tensor. Raises InvalidJob on every rank.
        """
        with collectives.fail_together():
            filled = buffers is not None and self._fill_from_boxes(module, by_value=mesh.get_rank() == 0)
        if collectives.maxima({"unfilled": float(not filled)})["unfilled"]:
            self._fill_from_rank_zero(module, mesh)
        elif buffers is not None:
            for name, value in buffers.items():
                module.get_buffer(name).copy_(value)

    def _fill_from_boxes(self, module: PreTrainedModel, *, by_value: bool) -> bool:
        try:
            with ModelFiles(Path(self.model.path), self._weights) as files:
                if (found := boxes(module, files)) is None:
                    return False
                folder = Path(self.model.path)
                check_whole_folder(module, files, folder, self._place, by_value=by_value)
                fill(found, files)
        except (OSError, SafetensorError) as error:
            raise self._refusal(error) from error
        return True

    @torch.no_grad()
    def _fill_from_rank_zero(self, module: PreTrainedModel, mesh: DeviceMesh) -> None:
        source: dict[str, Tensor] = {}
        with collectives.fail_together():
            if mesh.get_rank() == 0:
                source = self.whole()
                self._check_converted(module, source)
                self._check_tied(module, source)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if is_adapter(name):
                continue
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
            if mesh.get_rank() == 0:
                whole.copy_(source[name.replace(BASE, ".")])
            if isinstance(tensor, DTensor):
                tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
                continue
            if mesh.size() > 1:
                dist.broadcast(whole, 0)
            tensor.copy_(whole)

    def _check_converted(self, module: PreTrainedModel, source: Mapping[str, Tensor]) -> None:
        """Raises InvalidJob if transformers left out a tensor of the module: a tower that is trained beside a language
        model."""
        names = (name.replace(BASE, ".") for name, _ in module.named_parameters() if not is_adapter(name))
        if absent := next((name for name in names if name not in source), None):
            what = f"{self._place} has to be converted by transformers, which leaves out {absent}."
            raise InvalidJob(what, "save the model again (save_pretrained), or leave trainer.train_tower out.")

    def _check_tied(self, module: PreTrainedModel, source: Mapping[str, Tensor]) -> None:
        """Raises InvalidJob if transformers kept a tensor of the folder that the module ties to another one."""
        for name, tied_to in tied_names(module).items():
            own, read = source.get(name), source.get(tied_to)
            if own is not None and read is not None and not torch.equal(own, read):
                raise other_values(self._place, name, tied_to)

    def whole(self) -> dict[str, Tensor]:
        """Parameters and buffers as transformers reads them, in host memory: in the dtype of the folder, or, if its
        weights are quantized, in `dtype`. Raises InvalidJob."""
        transformers_logging.disable_progress_bar()
        try:
            elsewhere = checkpoint_folder(Path(self.model.path), self._weights) is not None
            ours = elsewhere or self._block_scales() is not None
            loaded, report = self._read_by_tensors() if ours else self._read_by_transformers()
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise self._refusal(error) from error
        if absent := sorted(report["missing_keys"]):
            what = f"{self._place} lacks {len(absent)} of the model's tensors, the first {absent[0]}."
            raise InvalidJob(what, "give a folder whose safetensors, or whose checkpoint, hold the whole model.")
        layers = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        unread = Unread.of(report["unexpected_keys"], (), tied={}, ignored=self._heads(loaded), layers=layers)
        unread.check(self._place)
        return {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}

    def _heads(self, loaded: PreTrainedModel) -> list[str]:
        """Patterns of the tensors of heads, if the model is built without one."""
        prefix = loaded.base_model_prefix
        return [] if hasattr(loaded, prefix) else [rf"^(?!{re.escape(prefix)}\.)"]

    def _refusal(self, error: Exception) -> InvalidJob:
        return InvalidJob(f"{self._place} cannot be loaded: {error}", FIX)

    def _block_scales(self) -> quantization.BlockScales | None:
        folder = Path(self.model.path)
        return quantization.block_scales(json.loads((folder / "config.json").read_text()), folder, self.field)

    def _read_by_transformers(self) -> Any:
        if readable(Path(self.model.path)):
            with ModelFiles(Path(self.model.path)) as files:
                files.check()
        return self.loader.from_pretrained(
            self.model.path,
            config=self.config,
            dtype="auto",
            trust_remote_code=self.model.trust_remote_code,
            output_loading_info=True,
        )

    def _read_by_tensors(self) -> Any:
        """Transformers gets the tensors of `ModelFiles` instead of the folder. It reads no distributed checkpoints;
        quantized weights it would keep quantized on a GPU, and elsewhere it refuses blocks that do not divide a
        tensor."""
        config = copy.deepcopy(self.config)  # transformers writes the dtype into it
        with torch.device("meta"):
            kind = type(self.loader.from_config(config, trust_remote_code=self.model.trust_remote_code))
        with ModelFiles(Path(self.model.path), self._weights) as files:
            tensors = {name: files.tensor(name) for name in files}
            return kind.from_pretrained(
                None, config=config, state_dict=tensors, dtype=self.dtype, output_loading_info=True
            )


def computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers of a model on the meta device that are not stored, as transformers sets them when it loads one.

    The parameters stay on the meta device, so their initialisation takes neither memory nor time. Raises
    NotImplementedError or RuntimeError if a model's initialisation reads its parameters.
    """
    names = [name for name, _ in model.named_non_persistent_buffers()]
    for name in names:
        owner, _, key = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        meta = buffers[key]
        assert meta is not None
        buffers[key] = torch.empty_like(meta, device="cpu")
    for part in model.modules():
        part.__dict__.pop("_is_hf_initialized", None)  # set on the meta device, where it means nothing
    model.initialize_weights()
    return {name: model.get_buffer(name) for name in names}


@dataclass(frozen=True)
class StoredBox:
    """A tensor of the folder, and the box of a module's tensor that it is."""

    stored: str
    target: Tensor
    box: ViewedBox


def folder_tensors(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The module's tensors that a folder stores, by their names without adapters. Tied weights come once."""
    for name, tensor in stored_tensors(module):
        if not is_adapter(name):
            yield name.replace(BASE, "."), tensor


def tied_names(module: PreTrainedModel) -> dict[str, str]:
    """Names of parameters that are tied to others, with the names under which these are read; without adapters."""
    read = {id(tensor): name for name, tensor in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    tied = {name: read[id(tensor)] for name, tensor in named if read[id(tensor)] != name}
    return {name.replace(BASE, "."): source.replace(BASE, ".") for name, source in tied.items()}


def check_whole_folder(module: PreTrainedModel, files: ModelFiles, folder: Path, place: str, *, by_value: bool) -> None:
    """Raises InvalidJob if the folder stores tensors with values of their own that the module does not take.
    `by_value`: tied ones are compared with the one that is read for them; otherwise names and shapes alone count.

    A module without a head ignores the folder's: tensors outside the module's own prefix."""
    if (found := boxes(module, files)) is None:
        return
    taken, prefix = {each.stored for each in found}, module.base_model_prefix
    ignored = list(module._keys_to_ignore_on_load_unexpected or ())
    if all(name.startswith(f"{prefix}.") for name in taken) and not hasattr(module, prefix):
        ignored.append(rf"^(?!{re.escape(prefix)}\.)")
    stored = {piece: _name_in(files, piece, prefix) for pair in tied_names(module).items() for piece in pair}
    tied = {str(stored[name]): str(stored[source]) for name, source in tied_names(module).items() if stored[name]}
    unread = Unread.of(files, taken, tied=tied, ignored=ignored, layers=layer_count(folder))
    check_unread(unread, files, folder, place, by_value=by_value)


def boxes(module: PreTrainedModel, files: ModelFiles) -> list[StoredBox] | None:
    """Where each tensor of the folder belongs. None if one is not a box of a tensor of the module, or is stored
    under an older name or in another shape: transformers has to convert such a folder."""
    found: list[StoredBox] = []
    for name, target in folder_tensors(module):
        if (pieces := stored_boxes(module, name, target.shape)) is None:
            return None
        for piece, (box, shape) in pieces.items():
            stored = _name_in(files, piece, module.base_model_prefix)
            if stored is None or tuple(files.tensor(stored).get_shape()) != shape:
                return None
            found.append(StoredBox(stored, target, box))
    return found


def _name_in(files: ModelFiles, name: str, prefix: str) -> str | None:
    """The tensor's name in a folder that was written by this model, by the model with a head, by the one without, or by
    a model that has towers beside its language model."""
    inner = name.removeprefix(f"{prefix}.")
    names = (name, f"{prefix}.{name}", inner, inside(f"{prefix}.{inner}"))
    return next((each for each in names if files.has(each)), None)


@torch.no_grad()
def fill(found: list[StoredBox], files: ModelFiles) -> None:
    """Reads this rank's part of each tensor. Not a collective. Raises InvalidJob, SafetensorError, OSError."""
    for each in found:
        part = LocalPart.of(each.target)
        low = [max(a, b) for a, b in zip(part.offset, each.box.offset, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(part.offset, part.values.shape, each.box.offset, each.box.extent, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        here = part.values[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, part.offset, strict=True))]
        here.copy_(_read(each, files, low, high).reshape(here.shape))


def _read(each: StoredBox, files: ModelFiles, low: list[int], high: list[int]) -> Tensor:
    """The elements of the stored tensor that are in the box from `low` to `high` of the module's tensor, with the
    module's order of dimensions; dimensions of one element may be missing."""
    stored = files.tensor(each.stored)
    dims: int = len(stored.get_shape())
    if dims == 0:
        return files.whole(each.stored)
    slices = [slice(0, 1)] * dims
    for dim, along in enumerate(each.box.along):
        if along is not None:
            start = each.box.offset[dim]
            slices[along] = slice(low[dim] - start, high[dim] - start)
    values: Tensor = stored[tuple(slices)]
    order = [along for along in each.box.along if along is not None]
    return values.permute(*order, *(dim for dim in range(dims) if dim not in order))


@dataclass(frozen=True)
class LocalPart:
    """The box of a tensor that this rank holds."""

    values: Tensor
    offset: tuple[int, ...]
    """First index of the box in the tensor, in each dimension."""

    @classmethod
    def of(cls, tensor: Tensor) -> "LocalPart":
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), (0,) * tensor.dim())
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tensor.to_local().detach(), tuple(offset))

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Takes this rank's box of a tensor that is whole here."""
        box = tuple(slice(o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))
        self.values.copy_(whole[box])
