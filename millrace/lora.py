"""The adapter that a job asks for, as far as it is known without a model: its options, which layers get one, and what a
PEFT folder holds whose adapter is trained further. Torch-free, so that coordinator, trainer and replicas agree.

The layers of a folder are those that have tensors there. What else PEFT's configuration can hold either says nothing
about how the adapter is added to its weights, or has to be off, as it is by default.
"""

import json
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from millrace.errors import InvalidJob, Mistake, refused, wrong_value
from millrace.spec.job import JobSpec
from millrace.spec.lora import MEGATRON_NAMES, Lora, folder_names
from millrace.validation.names import choose

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
(the tensors show it), how first values were found, and options of options that are off."""
OFF: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values of all other keys."""
MODEL_UNCHANGED = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""First values of adapters with which the model's own weights stay as they are."""
CONVERTIBLE = ("pissa", "olora", "corda", "lora_ga")
GIVE = f"give a folder that PEFT wrote: {CONFIG} and {WEIGHTS}, at the same path for every service."
Shape = tuple[int, ...]
TARGETS, EXCLUDED = "model.lora.target_modules", "model.lora.exclude_modules"
FROZEN_TOWER = "the model's tower for images, which is frozen and has no adapter"
RECURRENT = "GatedDeltaNet"
"""Ending of the class names of recurrent layers in transformers. The layers inside them have no adapter: engines fuse
them in another way than folders store them, and an adapter on them was not shown to be the same in trainer and
engine."""


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
        inputs, outputs = _columns(shapes[name]), _rows(shapes.get(whole + ends[1], ()))
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


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 0


def _columns(shape: Shape) -> int:
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


@dataclass(frozen=True)
class AskedAdapter:
    """The adapter that a job asks for."""

    options: Lora
    """The job's options, with the folder's in their place."""
    folder: AdapterFolder | None = None
    """What `adapter_path` names."""

    @classmethod
    def of(cls, lora: Lora) -> Self:
        """Raises InvalidJob for a folder that cannot be used."""
        if lora.adapter_path is None:
            return cls(lora)
        folder = read_adapter_folder(lora)
        return cls(folder.options, folder)

    def naming(self, name: str, layers: Sequence[str]) -> Self:
        """The same adapter, if `name` in the job means `layers`, if there are any."""
        if not layers:
            return self
        lists = {"target_modules": self.options.target_modules, "exclude_modules": self.options.exclude_modules}
        meant = {
            field: [each for given in names for each in (layers if given == name else (given,))]
            for field, names in lists.items()
            if not isinstance(names, str)
        }
        return replace(self, options=self.options.model_copy(update=meant))

    def choose(
        self,
        linear: Collection[str],
        named: Collection[str] = (),
        others: Collection[str] = (),
        recurrent: Collection[str] = (),
        tower: Collection[str] = (),
    ) -> list[str]:
        """The layers that get an adapter, in the order given: those in the folder, or by PEFT's rule those whose name,
        or an end of it after a dot, is a name in the job.

        `linear` are the layers that all-linear means, `named` further ones that may have an adapter, `others` those
        that never have one, `recurrent` those of `linear` inside a recurrence, which have none either; `tower` those
        of a tower for images, which is frozen: a name that both it and the language model have means the latter's.
        Raises InvalidJob for names that mean no layer, unless they are Megatron's (`absent` lists those), for names of
        recurrent layers and of the tower's, and if no layer is left.
        """
        _check_none_recurrent(self.options, {end for name in recurrent for end in ends(name)})
        linear = [name for name in linear if name not in recurrent]
        every = [*linear, *named]
        if self.folder is not None:
            return _stored(self.folder, every, tower)
        _check_none_of_tower(self.options, tower, every)
        asked, excluded = self.options.target_modules, self.options.exclude_modules
        mistakes = list(_unknown(EXCLUDED, excluded, [*every, *others, *tower]))
        if asked != "all-linear":
            mistakes += _unknown(TARGETS, asked, every)
        if mistakes:
            raise InvalidJob.of(mistakes)
        targets, without = set(folder_names(asked if asked != "all-linear" else [])), set(folder_names(excluded))
        candidates = linear if asked == "all-linear" else [name for name in every if not targets.isdisjoint(ends(name))]
        chosen = [name for name in candidates if without.isdisjoint(ends(name))]
        if not chosen:
            reason = (
                "exclude_modules leaves none of them" if candidates else "no layer of the model can have an adapter"
            )
            raise refused(TARGETS, asked, reason, "name other layers, or leave model.lora out.")
        return chosen


def recurrent_layers(modules: Mapping[str, object]) -> set[str]:
    """The names of `modules`, a model's parts by name, that lie inside a recurrent layer."""
    outer = tuple(f"{name}." for name, part in modules.items() if type(part).__name__.endswith(RECURRENT))
    return {name for name in modules if name.startswith(outer)} if outer else set()


def _check_none_recurrent(lora: Lora, recurrent_names: set[str]) -> None:
    """Raises InvalidJob if the job names a layer inside a recurrent one."""
    asked = [] if isinstance(lora.target_modules, str) else lora.target_modules
    if named := sorted(recurrent_names.intersection(asked)):
        reason = f"{', '.join(named)} is in a {RECURRENT}, which has no adapter"
        raise refused(TARGETS, asked, reason, "leave it out; layers of the full attention and the MLP can have one.")


def _check_none_of_tower(lora: Lora, tower: Collection[str], layers: Collection[str]) -> None:
    """Raises InvalidJob if the job names a layer that only the tower for images has, and none of `layers`. Megatron's
    names mean the language model's, also where a tower has layers of such a name."""
    asked = [] if isinstance(lora.target_modules, str) else lora.target_modules
    own = {end for layer in tower for end in ends(layer)} - {end for layer in layers for end in ends(layer)}
    if named := sorted(own.intersection(asked) - MEGATRON_NAMES.keys()):
        reason = f"{', '.join(named)} is in {FROZEN_TOWER}"
        raise refused(TARGETS, asked, reason, "leave it out; linear layers of the language model can have one.")


def absent(lora: Lora, layers: Collection[str]) -> Iterator[Mistake]:
    """Megatron's names in the job that mean none of `layers`: they are passed over, since one list of them serves
    models of every kind."""
    known = {end for layer in layers for end in ends(layer)}
    there = [name for name, parts in MEGATRON_NAMES.items() if not known.isdisjoint(parts)]
    for field, names in ((TARGETS, lora.target_modules), (EXCLUDED, lora.exclude_modules)):
        for name in names if not isinstance(names, str) else ():
            if name in MEGATRON_NAMES and name not in there:
                fix = f"leave it out; this model has {', '.join(there)}."
                yield wrong_value(field, name, "this model has no such layer, so the name is passed over", fix)


def ends(layer: str) -> Iterator[str]:
    """The layer's name, and each end of it that begins after a dot."""
    while layer:
        yield layer
        layer = layer.partition(".")[2]


def with_folder(spec: JobSpec) -> JobSpec:
    """The spec with the options of the folder that `model.lora.adapter_path` names. Raises InvalidJob."""
    if spec.model.lora is None or spec.model.lora.adapter_path is None:
        return spec
    lora = AskedAdapter.of(spec.model.lora).options
    return spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})})


def _unknown(field: str, names: Iterable[str], layers: Collection[str]) -> Iterator[Mistake]:
    """The names that mean none of `layers`, and are none of Megatron's."""
    reason = "no linear layer with a weight of its own has" if field == TARGETS else "no layer has"
    known = {end for layer in layers for end in ends(layer)}
    for name in names:
        if name not in known and name not in MEGATRON_NAMES:
            yield wrong_value(field, name, f"{reason} that name", choose(name, sorted({*map(_last, layers)})))


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


def _stored(folder: AdapterFolder, layers: Collection[str], tower: Collection[str]) -> list[str]:
    """The layers in the folder. Raises InvalidJob for one that the model has not, or that is of its tower."""
    if of_tower := folder.layers.keys() & set(tower):
        reason = f"its {min(of_tower)} is in {FROZEN_TOWER}"
        raise refused(FIELD, str(folder.path), reason, "give an adapter of the language model's layers alone.")
    if unknown := folder.layers.keys() - set(layers):
        reason = f"its {min(unknown)} is no linear layer of this model with a weight of its own"
        raise refused(FIELD, str(folder.path), reason, "give an adapter of this model.")
    return [name for name in layers if name in folder.layers]
