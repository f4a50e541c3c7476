"""Writes the model of a checkpoint for other programs, under the names and in the parts of the model folder.

It runs on any machine that sees the checkpoint and the job's model folder. One tensor is in memory at a time.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from rich.progress import Progress
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from millrace.errors import InvalidState
from millrace.megatron.architectures import read_shape
from millrace.weights.folder_tensors import predicts_ahead
from millrace.weights.loader.stored import pieces, published_dtype, stored_tensors
from services.trainer.checkpoints import huggingface
from services.trainer.checkpoints.box_files import BoxReader
from services.trainer.checkpoints.checkpoint import WEIGHTS, Description, open_checkpoint
from services.trainer.checkpoints.foreign.module_names import empty_module, module_form
from services.trainer.checkpoints.foreign.writing import CheckpointWriter, megatron_form
from services.trainer.checkpoints.model_files import ModelFiles
from services.trainer.protocol.adapter import LORA_A, LORA_B, MAGNITUDE, AdapterSettings, merged, tensor_name

Form = Literal["huggingface", "megatron", "dcp"]
"""Safetensors, a dist-checkpoint of Megatron-Core, or a checkpoint of torch.distributed.checkpoint."""


@dataclass(frozen=True)
class Exported:
    """What is exported."""

    description: Description
    stored: BoxReader
    folder: Path
    """The job's model folder."""
    weights: Path | None
    """The checkpoint with the model's weights, where they are not in the folder."""
    dtype: str
    trust: bool
    """Whether Python code in the folder may run."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the checkpoint, and those of the model that are not trained. Raises InvalidState,
        InvalidJob."""
        if self.description.adapter is not None:
            yield from self._merged(AdapterSettings(**self.description.adapter))
            return
        given = set[str]()
        stored_name = huggingface.names_in(self.folder, self.weights)
        for name, tensor in self._trained():
            given.add(stored_name(name))
            yield stored_name(name), tensor
        for name, tensor in huggingface.untrained(self.folder, given, self.weights):
            yield name, self._cast(name, tensor)

    @cached_property
    def _module(self) -> PreTrainedModel | None:
        """The model without memory for its parameters; None for a class that only Megatron trains."""
        return empty_module(self.folder, self.trust)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the model folder as it is written: some stay float32."""
        dtype = self.dtype if self._module is None else published_dtype(self._module, name, self.dtype)
        return tensor.to(getattr(torch, dtype)).contiguous() if tensor.is_floating_point() else tensor

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoints of FSDP2 have the tensors as the transformers module does (all experts of a layer in one), those
        of Megatron as the folder does, but for the place of a language model in a larger one."""
        stored, dtype, in_folder = self.stored, self.dtype, huggingface.names_in(self.folder, self.weights)
        left = {in_folder(name.removeprefix(WEIGHTS)): name for name in stored.names if name.startswith(WEIGHTS)}
        untrained: dict[str, tuple[tuple[int, ...], str]] = {}
        if (module := self._module) is not None:
            for name, like in stored_tensors(module):
                trained, kept = left.pop(in_folder(name), None), published_dtype(module, name, dtype)
                for piece, part in pieces(module, name, like if trained is None else stored.whole(trained)).items():
                    alone = left.pop(in_folder(piece), None)
                    if trained is not None or alone is not None:
                        values = part if alone is None else stored.whole(alone)
                        yield piece, values.to(getattr(torch, kept)).contiguous()
                    else:
                        untrained[piece] = (tuple(part.shape), kept)
        for name in sorted(left):
            yield name, stored.whole(left[name]).to(getattr(torch, dtype))
        with ModelFiles(self.folder, self.weights) as files:
            for name, (extent, kept) in untrained.items():
                yield name, files.slice_of(name, extent)[:].to(getattr(torch, kept))

    def _merged(self, settings: AdapterSettings) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model, those of layers with an adapter merged with it. Linear layers have the same names
        in the module, where the adapter was trained, and in the folder; but see `names_in`."""
        stored, ending, layers = self.stored, f".{LORA_A}.default.weight", huggingface.layer_count(self.folder)
        trained = [name.removeprefix(WEIGHTS) for name in stored.names if name.startswith(WEIGHTS)]
        stored_name = huggingface.names_in(self.folder, self.weights)
        layers_with = [name.removesuffix(ending) for name in trained if name.endswith(ending)]
        adapted = {stored_name(f"{layer}.weight").removesuffix(".weight"): layer for layer in layers_with}
        with ModelFiles(self.folder, self.weights) as files:
            if lacking := [layer for layer in sorted(adapted) if not files.has(f"{layer}.weight")]:
                lacks = f"{self.folder} has no tensor {adapted[lacking[0]]}.weight"
                what = f"{lacks}, for which the checkpoint has an adapter."
                raise InvalidState(what, "name the folder of the job's model with --model.")
            for name in files:
                if predicts_ahead(name, layers):
                    continue
                whole, layer = files.whole(name), name.removesuffix(".weight")
                if (own := adapted.get(layer)) is not None:
                    lora_a, lora_b = (stored.whole(WEIGHTS + tensor_name(own, part)) for part in (LORA_A, LORA_B))
                    magnitude = stored.whole(WEIGHTS + tensor_name(own, MAGNITUDE)) if settings.dora else None
                    whole = merged(whole, lora_a, lora_b, settings.scale, magnitude)
                yield name, self._cast(name, whole)


def write(
    checkpoint: Path,
    folder: Path,
    model: Path | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    weights: Path | None = None,
    form: Form = "huggingface",
) -> int:
    """Writes the folder and returns the number of its tensors. Raises MillraceError: nothing is left behind then."""
    description, stored = open_checkpoint(checkpoint)
    model = model or Path(description.model_folder)
    if not (model / "config.json").is_file():
        what = f"{checkpoint} is of a model whose folder is not here: there is no {model.absolute()}/config.json."
        raise InvalidState(what, "add --model FOLDER.")
    if weights is None and description.model_weights is not None:
        weights = Path(description.model_weights)
    if folder.exists():
        raise InvalidState(f"{folder} exists already.", "name a folder that does not exist.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    chosen = dtype or huggingface.dtype_of(model)
    exported, count = Exported(description, stored, model, weights, chosen, trust_remote_code), 0
    shards = _writer(form, partial, exported)
    try:
        with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
            task = progress.add_task("tensors", total=None)
            for name, tensor in exported.tensors():
                shards.add(name, tensor)
                count += 1
                progress.update(task, completed=count, description=name)
        shards.finish()
        huggingface.copy_rest(model, partial)
        if dtype is not None:
            huggingface.state_dtype(partial, dtype)
        os.rename(partial, folder)
    except (OSError, SafetensorError) as error:
        raise InvalidState(f"{folder} could not be written: {error}", "free disk space there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


def _writer(form: Form, folder: Path, exported: Exported) -> huggingface.SafetensorsWriter | CheckpointWriter:
    """Raises InvalidJob or InvalidState if the model cannot be written in this form."""
    if form == "huggingface":
        return huggingface.SafetensorsWriter(folder, huggingface.SHARD_BYTES)
    if form == "megatron":
        return CheckpointWriter(folder, megatron_form(read_shape(exported.folder)), megatron=True)
    module = empty_module(exported.folder, exported.trust)
    if module is None or (names := module_form(module)) is None:
        what = f"transformers builds no module of {exported.folder} whose tensors are those of the folder."
        raise InvalidState(what, "export it with --format huggingface.")
    return CheckpointWriter(folder, names, megatron=False)
