"""Whether this backend computes a job's model, told before a trainer loads it.

`python -m services.trainer.backends.fsdp2.model_check` reads a job spec as JSON on its standard input, builds the model
from its config without memory for its weights, and prints `{"mistakes": [{field, reason, fix, value}, …]}`.
"""

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.backends.fsdp2 import parse
from millrace.errors import InvalidJob
from millrace.spec import JobSpec
from millrace.spec import parse as parse_spec
from services.trainer.backends.fsdp2 import attention
from services.trainer.backends.fsdp2.computable import check_computable, check_config
from services.trainer.backends.fsdp2.layer_choice import choose_layers
from services.trainer.backends.fsdp2.loading.boxes import check_whole_folder
from services.trainer.backends.fsdp2.model import FIELD, load_config
from services.trainer.backends.fsdp2.proof.implementations import FLASH
from services.trainer.checkpoints.model_files import ModelFiles, readable

NAMES = {
    "auto": (attention.SEGMENTS, FLASH),
    "varlen": (attention.VARLEN,),
    "segments": (attention.SEGMENTS,),
    FLASH: (FLASH,),
    "sdpa": ("sdpa",),
}
"""Attention implementations of which one has to be right. The trainer's host may have flash-attn where this one has
not."""


def check(spec: JobSpec) -> None:
    """Raises InvalidJob for a model, or layers of an adapter, that the backend would refuse on any host."""
    config = load_config(spec.model)
    options = parse(spec.trainer.backend_options)
    check_config(spec, options, config, spec.model.path, FIELD)
    asked = options.attention
    if asked == "auto" and options.sequence_parallel_size > 1:
        asked = "varlen"  # flash-attn is not divided over ranks
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        what = f"{FIELD}: {spec.model.path} cannot be built as a language model: {reason}"
        raise InvalidJob(what, "give a model of an architecture that this release of transformers knows.") from error
    _check_any(module, NAMES[asked], spec.model.path)
    _check_folder(spec, module)
    if spec.model.lora is not None:
        choose_layers(module, spec.model.lora)


def _check_any(module: PreTrainedModel, implementations: tuple[str, ...], path: str) -> None:
    """Raises InvalidJob, about the first, if none of these attention implementations computes the model."""
    first: InvalidJob | None = None
    for implementation in implementations:
        try:
            return check_computable(module, implementation, path, FIELD)
        except InvalidJob as error:
            first = first or error
    if first is not None:
        raise first


def _check_folder(spec: JobSpec, module: PreTrainedModel) -> None:
    """Raises InvalidJob where names or shapes of the folder's tensors show that the model does not take one. Files that
    are not here are left to the trainer."""
    folder, weights = Path(spec.model.path), None if spec.model.weights is None else Path(spec.model.weights)
    if not readable(folder, weights):
        return
    place = f"{FIELD}: {folder}" if weights is None else f"model.weights: {weights}"
    with suppress(OSError, SafetensorError), ModelFiles(folder, weights) as files:
        check_whole_folder(module, files, folder, place, by_value=False)


def main() -> None:
    """Prints the mistakes."""
    try:
        check(parse_spec(json.load(sys.stdin)))
    except InvalidJob as error:
        print(json.dumps({"mistakes": [asdict(mistake) for mistake in error.mistakes]}))
    else:
        print(json.dumps({"mistakes": []}))


if __name__ == "__main__":
    main()
