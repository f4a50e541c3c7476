"""The adapter that an engine serves apart from the model's own weights: the layers that have one, and the shapes of its
tensors. The engine needs them when it starts, before anything is published."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from millrace.errors import InvalidJob, PublicationFailed, refused
from millrace.spec import JobSpec
from millrace.spec.lora import Lora, folder_names, is_router
from millrace.weights.plans.manifest import Manifest

PREFIX = "base_model.model."
"""Prefix of every name in a PEFT folder, and in the manifest of an adapter."""
FIELD = "model.lora.merge"
FIX = "set model.lora.merge to true: replicas get whole weights then, with the adapter merged into them."


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer with an adapter. The name is the Hugging Face model's, the sizes are those of its weight."""

    name: str
    inputs: int
    outputs: int

    @property
    def kind(self) -> str:
        """Last part of the name, which is the same in all decoder layers."""
        return self.name.rpartition(".")[2]

    @property
    def lora_a(self) -> str:
        """Published name of the adapter's A, [rank, inputs]."""
        return f"{PREFIX}{self.name}.lora_A.weight"

    @property
    def lora_b(self) -> str:
        """Published name of the adapter's B, [outputs, rank], which is multiplied by the adapter's scale."""
        return f"{PREFIX}{self.name}.lora_B.weight"


@dataclass(frozen=True)
class AdapterShape:
    """The layers with an adapter, in the model's order, and the rank of all of them."""

    rank: int
    layers: tuple[AdaptedLayer, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of its layers, sorted."""
        return sorted({layer.kind for layer in self.layers})

    def check(self, manifest: Manifest, dtype: str) -> None:
        """Raises PublicationFailed for a manifest that has not exactly the tensors of this adapter, in `dtype`."""
        wanted = {layer.lora_a: ((self.rank, layer.inputs), dtype) for layer in self.layers}
        wanted |= {layer.lora_b: ((layer.outputs, self.rank), dtype) for layer in self.layers}
        published = {t.name: (t.shape, t.dtype) for t in manifest.tensors}
        if differing := sorted({name for name, _ in set(wanted.items()) ^ set(published.items())}):
            names = ", ".join(differing[:5])
            what = f"{len(differing)} tensors of the adapter differ in name, shape or dtype: {names}."
            raise PublicationFailed(what, "see that trainer and engine read the same model folder and the same job.")

    def encode(self) -> str:
        """The shape as JSON, for the engine's workers."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: str) -> Self:
        """The reverse of `encode`."""
        fields = json.loads(data)
        return cls(fields["rank"], tuple(AdaptedLayer(**layer) for layer in fields["layers"]))


def adapter_shape(spec: JobSpec) -> AdapterShape | None:
    """The adapter that the job's replicas serve; None where they get whole weights. Raises InvalidJob."""
    lora = spec.model.lora
    if lora is None or not spec.model.publishes_adapter:
        return None
    if lora.adapter_path is not None:
        return _stored(Path(lora.adapter_path))
    adapted = tuple(_adapted_layers(spec, lora))
    if not adapted:
        reason = "the model has no such linear layer"
        raise refused("model.lora.target_modules", lora.target_modules, reason, 'name others, or write "all-linear".')
    return AdapterShape(lora.rank, adapted)


def not_served(reason: str) -> InvalidJob:
    """The error of an engine that cannot serve the job's adapter apart from the weights."""
    return refused(FIELD, False, reason, FIX)


def check_placed(shape: AdapterShape, engine: str, unplaced: Collection[Collection[str]]) -> None:
    """Raises InvalidJob where no worker has a place for the adapter of some layer. `unplaced` are the names of the
    layers that each worker has no place for."""
    if nowhere := set.intersection(*map(set, unplaced)):
        kinds = sorted({layer.kind for layer in shape.layers if layer.name in nowhere})
        raise not_served(f"{engine} has no place for the adapter of {', '.join(kinds)}")


def _is_adapted(name: str, lora: Lora) -> bool:
    """Whether the job trains an adapter for the linear layer `name`: PEFT's rule."""
    if is_router(name) or _named(name, folder_names(lora.exclude_modules)):
        return False
    return lora.target_modules == "all-linear" or _named(name, folder_names(lora.target_modules))


def _named(name: str, modules: Collection[str]) -> bool:
    """Whether `modules` has the name, or an end of it that begins after a dot."""
    return any(name == module or name.endswith(f".{module}") for module in modules)


def _adapted_layers(spec: JobSpec, lora: Lora) -> Iterator[AdaptedLayer]:
    """The layers of the job's model that get an adapter. Raises InvalidJob."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = spec.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(spec.model.path, trust_remote_code=trust)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise not_served(f"transformers does not build the model in {spec.model.path}: {error}") from error
    head = model.get_output_embeddings()
    for name, part in model.named_modules():
        if type(part) is not torch.nn.Linear or not _is_adapted(name, lora):
            continue
        if part is not head:
            yield AdaptedLayer(name, part.in_features, part.out_features)
        elif lora.target_modules != "all-linear":
            raise not_served(f"engines serve no adapter of the model's head, {name}")


def _stored(folder: Path) -> AdapterShape:
    """The shape of the adapter in a PEFT folder. Raises InvalidJob."""
    field, fix = "model.lora.adapter_path", "give a folder that PEFT wrote, at the same path for every service."
    shapes = _shapes_in(folder / "adapter_model.safetensors", field, fix)
    names = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in shapes if ".lora_A." in name]
    pairs = {name: (f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight") for name in names}
    if not names or {each for pair in pairs.values() for each in pair} != set(shapes):
        raise not_served(f"the adapter in {folder} has more than A and B of linear layers")
    layers = tuple(AdaptedLayer(name, shapes[a][1], shapes[b][0]) for name, (a, b) in pairs.items())
    (rank, *others) = {shapes[a][0] for a, _ in pairs.values()}
    if others:
        raise not_served(f"the adapter in {folder} has several ranks")
    return AdapterShape(rank, layers)


def _shapes_in(file: Path, field: str, fix: str) -> Mapping[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file. Raises InvalidJob."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise refused(field, str(file.parent), f"{file.name} cannot be read: {error}", fix) from error
