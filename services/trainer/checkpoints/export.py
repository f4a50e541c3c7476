"""`millrace export`: writes a checkpoint as an ordinary Hugging Face folder.

It runs on any machine that sees the checkpoint and the job's model folder. One tensor is in memory at a time.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.cli.output import print_error
from millrace.errors import InvalidState, MillraceError
from millrace.weights.loader.stored import pieces, published_dtype, stored_tensors
from services.trainer.checkpoints import huggingface
from services.trainer.checkpoints.box_files import BoxReader
from services.trainer.checkpoints.checkpoint import open_checkpoint
from services.trainer.checkpoints.description import Description
from services.trainer.checkpoints.model_files import ModelFiles
from services.trainer.protocol.adapter import LORA_A, LORA_B, MAGNITUDE, AdapterSettings, merged, tensor_name

WEIGHTS = "model."
"""Prefix of the names of weights in a checkpoint."""


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="OUTPUT/checkpoints/step-N of a job.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to; must not exist.")],
    model: Annotated[
        Path | None, typer.Option(help="The job's model folder, if it was moved.", show_default=False)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default: the dtype of the model folder.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="The same as the job's model.trust_remote_code.")] = False,
) -> None:
    """Write a checkpoint as an ordinary Hugging Face folder: safetensors, with config and tokenizer of the job's model.

    Checkpoints of any backend and any number of ranks can be exported. Tensors that are not trained (a router's bias
    under FSDP2, a vision tower under Megatron) are taken from the model folder.
    """
    try:
        count = write(checkpoint, folder, model, dtype, trust_remote_code)
    except MillraceError as error:
        print_error(error)
        raise typer.Exit(1) from error
    print(f"{folder}: {count} tensors of {checkpoint}")


def write(
    checkpoint: Path, folder: Path, model: Path | None = None, dtype: str | None = None, trust_remote_code: bool = False
) -> int:
    """Writes the folder and returns the number of its tensors. Raises MillraceError: nothing is left behind then."""
    description, stored = open_checkpoint(checkpoint)
    model = model or Path(description.model_folder)
    if not (model / "config.json").is_file():
        what = f"{checkpoint} is of a model whose folder is not here: there is no {model.absolute()}/config.json."
        raise InvalidState(what, "add --model FOLDER.")
    if folder.exists():
        raise InvalidState(f"{folder} exists already.", "name a folder that does not exist.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shards, count = huggingface.SafetensorsWriter(partial, huggingface.SHARD_BYTES), 0
    try:
        with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
            task = progress.add_task("tensors", total=None)
            chosen = dtype or huggingface.dtype_of(model)
            for name, tensor in _all_tensors(description, stored, model, chosen, trust_remote_code):
                shards.add(name, tensor)
                count += 1
                progress.update(task, completed=count, description=name)
        shards.finish()
        huggingface.copy_rest(model, partial)
        os.rename(partial, folder)
    except (OSError, SafetensorError) as error:
        raise InvalidState(f"{folder} could not be written: {error}", "free disk space there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


def _all_tensors(
    description: Description, stored: BoxReader, folder: Path, dtype: str, trust: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the checkpoint, and those of the model folder that are not trained."""
    if description.adapter is not None:
        yield from _merged_tensors(AdapterSettings(**description.adapter), stored, folder, getattr(torch, dtype))
        return
    given = set[str]()
    for name, tensor in _trained_tensors(stored, folder, dtype, trust):
        given.add(name)
        yield name, tensor
    for name, tensor in huggingface.untrained(folder, given):
        yield name, tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _trained_tensors(stored: BoxReader, folder: Path, dtype: str, trust: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the checkpoint under the names and in the parts of the model folder.

    Checkpoints of FSDP2 have them as the transformers module does (all experts of a layer in one tensor), those of
    Megatron as the folder does.
    """
    left = {name.removeprefix(WEIGHTS) for name in stored.names if name.startswith(WEIGHTS)}
    untrained: dict[str, tuple[tuple[int, ...], str]] = {}
    if (module := _module(folder, trust)) is not None:
        for name, like in stored_tensors(module):
            trained, kept = name in left, published_dtype(module, name, dtype)
            left.discard(name)
            for piece, part in pieces(module, name, stored.whole(WEIGHTS + name) if trained else like).items():
                if trained or piece in left:
                    left.discard(piece)
                    values = part if trained else stored.whole(WEIGHTS + piece)
                    yield piece, values.to(getattr(torch, kept)).contiguous()
                else:
                    untrained[piece] = (tuple(part.shape), kept)
    for name in sorted(left):
        yield name, stored.whole(WEIGHTS + name).to(getattr(torch, dtype))
    with ModelFiles(folder) as files:
        for name, (extent, kept) in untrained.items():
            yield name, files.slice_of(name, extent)[:].to(getattr(torch, kept))


def _merged_tensors(
    settings: AdapterSettings, stored: BoxReader, folder: Path, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the model folder, those of layers with an adapter merged with it. Linear layers have the same
    names in the module, where the adapter was trained, and in the folder."""
    ending, layers = f".{LORA_A}.default.weight", huggingface.layer_count(folder)
    trained = [name.removeprefix(WEIGHTS) for name in stored.names if name.startswith(WEIGHTS)]
    adapted = {name.removesuffix(ending) for name in trained if name.endswith(ending)}
    with ModelFiles(folder) as files:
        if lacking := [layer for layer in sorted(adapted) if not files.has(f"{layer}.weight")]:
            what = f"{folder} has no tensor {lacking[0]}.weight, for which the checkpoint has an adapter."
            raise InvalidState(what, "name the folder of the job's model with --model.")
        for name in files:
            if huggingface.predicts_ahead(name, layers):
                continue
            whole, layer = files.whole(name), name.removesuffix(".weight")
            if layer in adapted:
                lora_a, lora_b = (stored.whole(WEIGHTS + tensor_name(layer, part)) for part in (LORA_A, LORA_B))
                magnitude = stored.whole(WEIGHTS + tensor_name(layer, MAGNITUDE)) if settings.dora else None
                whole = merged(whole, lora_a, lora_b, settings.scale, magnitude)
            yield name, whole.to(dtype).contiguous() if whole.is_floating_point() else whole


def _module(folder: Path, trust: bool) -> nn.Module | None:
    """The model without memory for its parameters; None for a class that only Megatron trains."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust:
        return None
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    return module


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(export)
    app(prog_name="millrace export")
