"""Checks that this backend computes a job's model and its critic, before a trainer loads them.

`python -m services.trainer.backends.fsdp2.model_check` reads a job spec as JSON on its standard input, builds the
models from their configs without memory for weights, and prints `{"mistakes": [{field, reason, fix, value}, …]}`.
"""

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModel, PreTrainedModel

from millrace.backends.fsdp2 import parse
from millrace.data.pictures import loader_of
from millrace.errors import InvalidJob, Mistake
from millrace.spec import JobSpec
from millrace.spec import parse as parse_spec
from millrace.spec.model import Model
from millrace.weights.folder_tensors import stored_shapes
from millrace.weights.loader.stored import follow_folder
from services.trainer.backends.fsdp2 import attention
from services.trainer.backends.fsdp2.adapted import choose_layers
from services.trainer.backends.fsdp2.computable import check_computable, check_config
from services.trainer.backends.fsdp2.loading import check_whole_folder
from services.trainer.backends.fsdp2.model import FIELD, load_config
from services.trainer.backends.tower import with_tower, without_tower
from services.trainer.checkpoints.model_files import CRITIC_FIELD, ModelFiles, readable, stored_head

NAMES = {
    "auto": (attention.SEGMENTS, attention.FLASH2),
    **{name: (own,) for name, own in attention.OWN.items()},
    **{name: (name,) for name in (attention.FLASH2, "sdpa")},
}
"""Attention implementations of which one has to be right. The trainer's host may have flash-attn if this one has
not."""


def check(spec: JobSpec) -> None:
    """Raises InvalidJob for a model, layers of an adapter, or a critic that the backend would refuse on any host, with
    what is wrong with each of the two models."""
    mistakes: list[Mistake] = []
    for check_one in (_check_policy, _check_critic):
        try:
            check_one(spec)
        except InvalidJob as error:
            mistakes += error.mistakes
    if mistakes:
        raise InvalidJob.of(mistakes)


def _check_policy(spec: JobSpec) -> None:
    module = _checked(spec, spec.model, None, FIELD)
    if spec.model.lora is not None:
        choose_layers(module, spec.model.lora)


def _check_critic(spec: JobSpec) -> None:
    if (critic := spec.algorithm.critic) is None:
        return
    source = spec.model
    if critic.path is not None:
        source = source.model_copy(update={"path": critic.path, "weights": None})
    as_critic = spec.model_copy(update={"trainer": spec.trainer.of("critic")})
    module = _checked(as_critic, source, AutoModel, CRITIC_FIELD)
    with suppress(OSError, SafetensorError):
        stored_head(Path(source.path), module.config.get_text_config().hidden_size)


def _checked(spec: JobSpec, model: Model, loader: Any, field: str) -> PreTrainedModel:
    """The model that `field` names, without memory for its weights, as transformers' `loader` builds it (None: that of
    a language model). Raises InvalidJob."""
    config = load_config(model, field)
    options = parse(spec.trainer.backend_options)
    check_config(spec, options, config, model.path, field)
    asked = options.attention
    if asked == "auto" and options.sequence_parallel_size > 1:
        asked = "varlen"  # flash-attn is not divided over ranks
    try:
        with torch.device("meta"):
            built = (loader or loader_of(config)).from_config(config, trust_remote_code=model.trust_remote_code)
            follow_folder(built, stored_shapes(Path(model.path)))
            trained = spec.trainer.train_tower
            module: PreTrainedModel = with_tower(built, model, config) if trained else without_tower(built)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        what = f"{field}: {model.path} cannot be built as a language model: {reason}"
        raise InvalidJob(what, "give a model of an architecture that this release of transformers knows.") from error
    _check_any(module, NAMES[asked], model.path, field)
    _check_folder(model, module, field)
    return module


def _check_any(module: PreTrainedModel, implementations: tuple[str, ...], path: str, field: str) -> None:
    """Raises InvalidJob, about the first, if none of these attention implementations computes the model."""
    first: InvalidJob | None = None
    for implementation in implementations:
        try:
            return check_computable(module, implementation, path, field)
        except InvalidJob as error:
            first = first or error
    if first is not None:
        raise first


def _check_folder(model: Model, module: PreTrainedModel, field: str) -> None:
    """Raises InvalidJob if names or shapes of the folder's tensors show that the model does not take one. Files that
    are not here are left to the trainer."""
    folder, weights = Path(model.path), None if model.weights is None else Path(model.weights)
    if not readable(folder, weights):
        return
    place = f"{field}: {folder}" if weights is None else f"model.weights: {weights}"
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
