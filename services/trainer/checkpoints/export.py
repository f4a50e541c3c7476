"""`millrace export`: writes a checkpoint as an ordinary Hugging Face folder.

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

from millrace.cli.output import print_error
from millrace.errors import InvalidState, MillraceError
from services.trainer.checkpoints import huggingface
from services.trainer.checkpoints.checkpoint import open_checkpoint
from services.trainer.checkpoints.exported import Exported


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
    weights: Annotated[
        Path | None, typer.Option(help="The job's model.weights, if it was moved.", show_default=False)
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
        count = write(checkpoint, folder, model, dtype, trust_remote_code, weights)
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
    shards, count = huggingface.SafetensorsWriter(partial, huggingface.SHARD_BYTES), 0
    try:
        with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
            task = progress.add_task("tensors", total=None)
            chosen = dtype or huggingface.dtype_of(model)
            for name, tensor in Exported(description, stored, model, weights, chosen, trust_remote_code).tensors():
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


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(export)
    app(prog_name="millrace export")
