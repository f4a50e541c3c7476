"""A PEFT folder whose adapter a job trains further: what its files tell without being loaded.

Its layers are those that have tensors there. What else PEFT's configuration can hold either says nothing about how the
adapter is added to its weights, or has to be off, as it is by default.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millrace.errors import InvalidJob, Mistake, refused, wrong_value
from millrace.spec.lora import Lora

FIELD = "model.lora.adapter_path"
CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""Prefix of every name in a PEFT folder."""
OPTIONS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
"""Options of a job that the folder has too, and PEFT's names of them."""
READ = frozenset({*OPTIONS.values(), "peft_type", "init_lora_weights"})
WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "runtime_config", "task_type"),
        *("inference_mode", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
        *("megatron_core", "qalora_group_size"),
    }
)
"""PEFT's keys that do not change what a stored adapter adds to its weights: where it comes from, which layers have one
(the tensors tell), how first values were found, and options of options that are off."""
OFF: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values of all other keys."""
MODEL_UNCHANGED = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""First values of adapters with which the model's own weights stay as they are."""
CONVERTIBLE = ("pissa", "olora", "corda", "lora_ga")
GIVE = f"give a folder that PEFT wrote: {CONFIG} and {WEIGHTS}, at the same path for every service."
Shape = tuple[int, ...]


@dataclass(frozen=True)
class AdapterFolder:
    """The adapter in a PEFT folder."""

    path: Path
    options: Lora
    """The job's options with the folder's in their place: rank, alpha, rslora, dora, and as `target_modules` the last
    parts of the names of its layers."""
    layers: Mapping[str, tuple[int, int]]
    """The layers that have an adapter by their names in the model folder: inputs and outputs."""


def read_adapter_folder(lora: Lora) -> AdapterFolder:
    """The folder `lora.adapter_path`. Raises InvalidJob with everything that cannot be used, and for options of the job
    that differ from the folder's. An option that has its default counts as left out: a spec that went through JSON
    holds every option."""
    folder = Path(lora.adapter_path or "")
    tree = _config(folder)
    if mistakes := [*_unread(folder, tree)]:
        raise InvalidJob.of(mistakes)
    options = _options(folder, tree, lora)
    layers = _layers(folder, options)
    kinds = sorted({layer.rpartition(".")[2] for layer in layers})
    return AdapterFolder(folder, options.model_copy(update={"target_modules": kinds}), layers)


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise refused(FIELD, str(folder), "there is no such folder", GIVE)
    try:
        tree = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        reason = f"{CONFIG} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refused(FIELD, str(folder), reason, GIVE) from error
    if not isinstance(tree, dict):
        raise refused(FIELD, str(folder), f"{CONFIG} is not a JSON object", GIVE)
    return tree


def _unread(folder: Path, tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """What the configuration asks for beyond the options of a job."""
    if tree.get("peft_type") != "LORA":
        reason = f"its peft_type is {json.dumps(tree.get('peft_type'))}"
        yield wrong_value(FIELD, str(folder), reason, "give an adapter whose peft_type is LORA.")
        return
    first = tree.get("init_lora_weights", True)
    if first not in MODEL_UNCHANGED:
        reason = f"its init_lora_weights is {json.dumps(first)}: PEFT changes the model's own weights to load it"
        fix = "give an adapter of the unchanged model."
        if str(first).lower().startswith(CONVERTIBLE):
            fix = "save it as an adapter of the unchanged model: PEFT's save_pretrained with "
            fix += "path_initial_model_for_weight_conversion."
        yield wrong_value(FIELD, str(folder), reason, fix)
    for key, value in tree.items():
        if key not in READ and key not in WITHOUT_EFFECT and value not in OFF:
            reason = f"its {key} is {json.dumps(value)[:80]}, and adapters here have no such option"
            yield wrong_value(FIELD, str(folder), reason, f"give an adapter with PEFT's default of {key}.")


def _options(folder: Path, tree: Mapping[str, Any], lora: Lora) -> Lora:
    """The job's options with those of the folder. Raises InvalidJob."""
    found = {name: tree.get(key, False) for name, key in OPTIONS.items()}
    try:
        options = Lora.model_validate({**found, "adapter_path": lora.adapter_path, "merge": lora.merge}, strict=True)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        reason = f"its {OPTIONS[name]} is {json.dumps(tree.get(OPTIONS[name]))}, which {CONFIG} cannot have"
        raise refused(FIELD, str(folder), reason, GIVE) from error
    for name in OPTIONS:
        asked, stored = getattr(lora, name), getattr(options, name)
        if asked not in (Lora.model_fields[name].default, stored):
            raise refused(f"model.lora.{name}", asked, f"the adapter in {folder} has {stored}", "leave it out.")
    if options.dora and not lora.merge:
        reason = f"engines cannot serve DoRA, which the adapter in {folder} is"
        raise refused("model.lora.merge", False, reason, "set it to true.")
    return options.model_copy(update={"dropout": lora.dropout})


def _layers(folder: Path, options: Lora) -> dict[str, tuple[int, int]]:
    """The layers that have tensors in the folder. Raises InvalidJob for tensors that are not those of linear layers
    with adapters of one rank."""
    shapes = _shapes(folder)
    ends = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
    layers: dict[str, tuple[int, int]] = {}
    wanted: dict[str, Shape] = {}
    for name in (name for name in shapes if name.startswith(PREFIX) and name.endswith(ends[0])):
        whole = name.removesuffix(ends[0])
        inputs, outputs = _last(shapes[name]), _first(shapes.get(whole + ends[1], ()))
        layers[whole.removeprefix(PREFIX)] = inputs, outputs
        wanted |= {name: (options.rank, inputs), whole + ends[1]: (outputs, options.rank)}
        if options.dora:
            wanted[whole + ends[2]] = (outputs,)
    fix = "give an adapter of linear layers, with one rank for all of them."
    if others := shapes.keys() - wanted.keys():
        reason = f"{WEIGHTS} has {min(others)}, which is no part of an adapter of a linear layer"
        raise refused(FIELD, str(folder), reason, fix)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            reason = f"{WEIGHTS} has no {name}" if name not in shapes else f"its {name} has shape {shapes[name]}"
            raise refused(FIELD, str(folder), f"{reason}, and the rank is {options.rank}", fix)
    if not layers:
        raise refused(FIELD, str(folder), f"{WEIGHTS} has no adapter", fix)
    return layers


def _first(shape: Shape) -> int:
    return shape[0] if shape else 0


def _last(shape: Shape) -> int:
    return shape[-1] if shape else 0


def _shapes(folder: Path) -> dict[str, Shape]:
    """The shape of each tensor, from the header of the safetensors file. Raises InvalidJob."""
    file = folder / WEIGHTS
    if not file.is_file() and (folder / PICKLED).is_file():
        reason, fix = f"it has {PICKLED} and no {WEIGHTS}", "save it as safetensors: PEFT's save_pretrained does."
        raise refused(FIELD, str(folder), reason, fix)
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if 8 + length > (size := os.fstat(opened.fileno()).st_size):
                raise ValueError("it is cut short")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        if 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0) > size:
            raise ValueError("it is cut short")
        return {name: tuple(each["shape"]) for name, each in header.items()}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        reason = f"{WEIGHTS} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refused(FIELD, str(folder), reason, GIVE) from error
