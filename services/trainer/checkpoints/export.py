"""`millrace export`: the command and its options. What it runs is imported once the options are read, so that `--help`
answers at once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from millrace.interrupt import importing

with importing():
    import typer

    from millrace.errors import InvalidState, MillraceError
    from millrace.terminal.output import print_error
    from services.trainer.checkpoints import FILE


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
        check_checkpoint(checkpoint)
        with importing():
            from services.trainer.checkpoints.exported import write  # imports torch and transformers

        count = write(checkpoint, folder, model, dtype, trust_remote_code, weights, format.value)
    except MillraceError as error:
        print_error(error)
        raise typer.Exit(1) from error
    print(f"{folder}: {count} tensors of {checkpoint}")


def check_checkpoint(folder: Path) -> None:
    """Raises InvalidState for a folder that is no checkpoint, and names the newest of those in it: a job's OUTPUT is
    often given instead."""
    if (folder / FILE).is_file():
        return
    steps = {
        int(number): path
        for path in (*folder.glob("step-*"), *folder.glob("checkpoints/step-*"))
        if (number := path.name.removeprefix("step-")).isdecimal() and (path / FILE).is_file()
    }
    fix = f"give one in it; the newest is {steps[max(steps)]}." if steps else "give OUTPUT/checkpoints/step-N of a job."
    raise InvalidState(f"{folder} is not a checkpoint: there is no {FILE} in it.", fix)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(export)
    app(prog_name="millrace export")
