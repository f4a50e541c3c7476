"""`millrace export`: writes the model of a checkpoint for other programs.

It runs on any machine that sees the checkpoint and the job's model folder. One tensor is in memory at a time.
"""

import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from safetensors import SafetensorError

from millrace.errors import InvalidState, MillraceError
from millrace.megatron.architectures import read_shape
from millrace.terminal.output import print_error
from services.trainer.checkpoints import huggingface
from services.trainer.checkpoints.checkpoint import open_checkpoint
from services.trainer.checkpoints.exported import Exported
from services.trainer.checkpoints.foreign.module_names import empty_module, module_form
from services.trainer.checkpoints.foreign.writing import CheckpointWriter
from services.trainer.checkpoints.foreign.written import megatron_form


class Format(StrEnum):
    HUGGINGFACE = "huggingface"
    """Safetensors."""
    MEGATRON = "megatron"
    """A dist-checkpoint of Megatron-Core, of the format torch_dist."""
    DCP = "dcp"
    """A checkpoint of torch.distributed.checkpoint, with the names of the transformers module."""


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="OUTPUT/checkpoints/step-N of a job.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to; must not exist.")],
    format: Annotated[
        Format,
        typer.Option(help="Safetensors, Megatron-Core's dist-checkpoint, or a torch distributed checkpoint."),
    ] = Format.HUGGINGFACE,
    model: Annotated[
        Path | None, typer.Option(help="The job's model folder, if it was moved.", show_default=False)
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The job's model.weights, if it was moved.", show_default=False)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default: the dtype of the model folder.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="The same as the job's model.trust_remote_code.")] = False,
) -> None:
    """Write the model of a checkpoint, with config and tokenizer of the job's model: as an ordinary Hugging Face
    folder, or with the weights in a distributed checkpoint.

    Checkpoints of any backend and any number of ranks can be exported. Tensors that are not trained (a router's bias
    under FSDP2, a vision tower under Megatron) are taken from the model folder.
    """
    try:
        count = write(checkpoint, folder, model, dtype, trust_remote_code, weights, format)
    except MillraceError as error:
        print_error(error)
        raise typer.Exit(1) from error
    print(f"{folder}: {count} tensors of {checkpoint}")


def write(
    checkpoint: Path,
    folder: Path,
    model: Path | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    weights: Path | None = None,
    form: Format = Format.HUGGINGFACE,
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
        os.rename(partial, folder)
    except (OSError, SafetensorError) as error:
        raise InvalidState(f"{folder} could not be written: {error}", "free disk space there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


def _writer(form: Format, folder: Path, exported: Exported) -> huggingface.SafetensorsWriter | CheckpointWriter:
    """Raises InvalidJob or InvalidState where the model cannot be written in this form."""
    if form == Format.HUGGINGFACE:
        return huggingface.SafetensorsWriter(folder, huggingface.SHARD_BYTES)
    if form == Format.MEGATRON:
        return CheckpointWriter(folder, megatron_form(read_shape(exported.folder)), megatron=True)
    module = empty_module(exported.folder, exported.trust)
    if module is None or (names := module_form(module)) is None:
        what = f"transformers builds no module of {exported.folder} whose tensors are those of the folder."
        raise InvalidState(what, "export it with --format huggingface.")
    return CheckpointWriter(folder, names, megatron=False)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(export)
    app(prog_name="millrace export")
