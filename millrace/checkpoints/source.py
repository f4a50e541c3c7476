"""Finds the checkpoint that a job's model is read from, and reports at submission what is wrong with it."""

import json
from collections.abc import Mapping
from pathlib import Path

from millrace.backends.megatron import MegatronOptions
from millrace.checkpoints import megatron_names
from millrace.checkpoints.index import CheckpointIndex, Located, Part, is_checkpoint, read_index
from millrace.errors import InvalidJob, refused
from millrace.megatron.architectures import ARCHITECTURES, read_shape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, tensors

FIELD = "model.weights"
DESCRIPTION = "metadata.json"
"""Megatron-Core's file in a dist-checkpoint: it names the format."""
TORCH_DIST = "torch_dist"
SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
FUSED = ".experts."
"""Part of the names of experts, which transformers has in one tensor and a model folder one by one."""
RENAMED = ("mixtral", "qwen2_5_vl", "qwen3_vl")
"""Architectures whose modules have other names in transformers than in the weight map."""


def checkpoint_folder(folder: Path, weights: Path | None) -> Path | None:
    """The distributed checkpoint from which the model in `folder` is read: `weights`, or the folder itself. None if
    it is read from the folder's safetensors."""
    if weights is not None:
        return weights
    own = any((folder / name).is_file() for name in SAFETENSORS)
    return folder if is_checkpoint(folder) and not own else None


def is_megatron(folder: Path, field: str) -> bool:
    """Whether the checkpoint is a dist-checkpoint of Megatron-Core. Raises InvalidJob for one of another format than
    torch_dist."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return False
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "write or copy the checkpoint again."
        raise refused(field, str(folder), f"{DESCRIPTION} does not name the checkpoint's format", fix) from error
    if backend != TORCH_DIST:
        reason = f"is a dist-checkpoint of the format {backend!r}"
        raise refused(field, str(folder), reason, f"write it with Megatron's format {TORCH_DIST} (--ckpt-format).")
    return True


def located(index: CheckpointIndex, folder: Path) -> Mapping[str, Located]:
    """The tensors of the checkpoint that belong to the model in `folder`. Raises InvalidJob."""
    if not is_megatron(index.folder, index.field):
        return located_huggingface(index)
    kind = _model_type(folder)
    if kind not in ARCHITECTURES:
        reason = f"is a dist-checkpoint, and Megatron's names for the architecture {kind!r} are not known"
        fix = f"convert it to a Hugging Face folder; known are {', '.join(sorted(ARCHITECTURES))}."
        raise refused(index.field, str(index.folder), reason, fix)
    return megatron_names.located(index, read_shape(folder))


def check_checkpoint(folder: Path, weights: Path | None, field: str = FIELD) -> None:
    """Raises InvalidJob if the model in `folder` is read from a distributed checkpoint that lacks a file or a tensor,
    or has a tensor of another shape than the config says. If the architecture's names are not known here, the trainer
    reports which tensor is missing."""
    source = checkpoint_folder(folder, weights)
    if source is None:
        return
    index = read_index(source, field)
    found = located(index, folder)
    fused = any(FUSED in name for name in found)
    for name, shape in _expected(folder, is_megatron(source, field)).items():
        if name in found and found[name].shape != shape:
            reason = f"{name} is {found[name].shape}, the config asks for {shape}"
            raise refused(field, str(source), reason, "give the config.json of the model in this checkpoint.")
        if name not in found and not (fused and FUSED in name):
            held = ", ".join(sorted(index.tensors)[:3])
            reason = f"has no tensor for {name}, which the config asks for; its first tensors are {held}"
            raise refused(field, str(source), reason, "give a complete checkpoint of the model of this config.json.")


def _expected(folder: Path, megatron: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of the model in `folder`, if they are known without building it."""
    kind = _model_type(folder)
    if kind not in ARCHITECTURES or (kind in RENAMED and not megatron):
        return {}
    try:
        shape = read_shape(folder)
    except InvalidJob:
        return {}  # a model that only the other backend builds
    return {tensor.name: tensor.shape for tensor in tensors(shape, Topology(1, MegatronOptions()), LOCAL)}


def _model_type(folder: Path) -> str:
    """Raises InvalidJob if there is no config."""
    try:
        return str(json.loads((folder / "config.json").read_text()).get("model_type"))
    except (OSError, ValueError, AttributeError) as error:
        fix = "give the folder of a Hugging Face model, with config and tokenizer."
        raise refused("model.path", str(folder), "its config.json cannot be read", fix) from error


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP1 and activation checkpointing add anywhere."""
OUTER = ("module.", "app.", "state.")
"""Beginnings of names that a wrapped module or a program's own state dict adds."""
TWICE = "model.model."
"""Names begin so if the state dict of a language model is stored as `model`."""
OTHERS = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "rng")
"""Beginnings of keys that are not the model's."""


def located_huggingface(index: CheckpointIndex) -> dict[str, Located]:
    """The tensors of the checkpoint by the names that they have in the module."""
    return {
        name: Located(stored.shape, stored.dtype, (_whole(key, stored.shape),))
        for name, key in names(index).items()
        if (stored := index.tensors[key])
    }


def names(index: CheckpointIndex) -> dict[str, str]:
    """Name in the module → key in the checkpoint."""
    found = {
        ".".join(part for part in key.split(".") if part not in WRAPPERS): key
        for key in index.tensors
        if not key.startswith(OTHERS)
    }
    while True:
        outer = next((start for start in OUTER if any(name.startswith(start) for name in found)), None)
        if outer is None and any(name.startswith(TWICE) for name in found):
            outer = "model."
        if outer is None:
            return found
        found = {name.removeprefix(outer): key for name, key in found.items() if name.startswith(outer)}


def _whole(key: str, shape: tuple[int, ...]) -> Part:
    zero = (0,) * len(shape)
    return Part(key, zero, shape, zero, tuple(range(len(shape))))
