"""The adapter that a job asks for: by its options, or by the folder whose adapter is trained further."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from millrace.errors import InvalidJob, Mistake, refused, wrong_value
from millrace.lora.folder import FIELD, AdapterFolder, read_adapter_folder
from millrace.spec.job import JobSpec
from millrace.spec.lora import MEGATRON_NAMES, Lora, folder_names
from millrace.validation.names import choose

TARGETS, EXCLUDED = "model.lora.target_modules", "model.lora.exclude_modules"
RECURRENT = "GatedDeltaNet"
"""The end of the names of classes whose inner layers have no adapter. Engines fuse these layers in another way than
folders store them, and an adapter on them was not shown to be the same in trainer and engine."""


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
        """The same adapter, where `name` in the job means `layers`, if there are any."""
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
    ) -> list[str]:
        """The layers that get an adapter, in the order given: those in the folder, or by PEFT's rule those whose name,
        or an end of it after a dot, is a name in the job.

        `linear` are the layers that all-linear means, `named` further ones that may have an adapter, `others` those
        that never have one, `recurrent` those of `linear` inside a recurrence, which have none either. Raises
        InvalidJob for names that mean no layer, unless they are Megatron's (`absent` tells those), for names of
        recurrent layers, and where no layer is left.
        """
        _check_none_recurrent(self.options, {end for name in recurrent for end in ends(name)})
        linear = [name for name in linear if name not in recurrent]
        every = [*linear, *named]
        if self.folder is not None:
            return _stored(self.folder, every)
        asked, excluded = self.options.target_modules, self.options.exclude_modules
        mistakes = list(_unknown(EXCLUDED, excluded, [*every, *others]))
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
    """Raises InvalidJob where the job names a layer inside a recurrent one."""
    asked = [] if isinstance(lora.target_modules, str) else lora.target_modules
    if named := sorted(recurrent_names.intersection(asked)):
        reason = f"{', '.join(named)} is in a {RECURRENT}, which has no adapter"
        raise refused(TARGETS, asked, reason, "leave it out; layers of the full attention and the MLP can have one.")


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


def _stored(folder: AdapterFolder, layers: Collection[str]) -> list[str]:
    """The layers in the folder. Raises InvalidJob for one that the model has not."""
    if unknown := folder.layers.keys() - set(layers):
        reason = f"its {min(unknown)} is no linear layer of this model with a weight of its own"
        raise refused(FIELD, str(folder.path), reason, "give an adapter of this model.")
    return [name for name in layers if name in folder.layers]
