"""The adapter that an engine serves apart from the model's own weights: the layers that have one, and the shapes of its
tensors. The engine needs them when it starts, before anything is published."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

from millrace.data.pictures import loader_of
from millrace.errors import InvalidJob, PublicationFailed, refused
from millrace.lora import PREFIX, AskedAdapter, recurrent_layers
from millrace.spec import JobSpec
from millrace.spec.lora import folder_names, is_router
from millrace.weights.folder_tensors import TOWER
from millrace.weights.plans.manifest import Manifest

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


class AdapterTensors:
    """What the slots of all engines have in common: the check of a manifest. See `LoadedPart`."""

    padded: frozenset[str] = frozenset()

    def __init__(self, shape: AdapterShape, dtype: str) -> None:
        self._shape = shape
        self._dtype = dtype

    def check(self, manifest: Manifest) -> None:
        self._shape.check(manifest, self._dtype)

    def update_derived(self) -> None:
        """Nothing is derived."""


def adapter_shape(spec: JobSpec) -> AdapterShape | None:
    """The adapter that the job's replicas serve; None if they get whole weights. Raises InvalidJob."""
    lora = spec.model.lora
    if lora is None or not spec.model.publishes_adapter:
        return None
    asked = AskedAdapter.of(lora)
    found = _adapted_layers(spec, asked) if asked.folder is None else asked.folder.layers
    return AdapterShape(asked.options.rank, tuple(AdaptedLayer(name, *sizes) for name, sizes in found.items()))


def not_served(reason: str) -> InvalidJob:
    """The error of an engine that cannot serve the job's adapter apart from the weights."""
    return refused(FIELD, False, reason, FIX)


def check_placed(shape: AdapterShape, engine: str, unplaced: Collection[Collection[str]]) -> None:
    """Raises InvalidJob if no worker has a place for the adapter of some layer. `unplaced` are the names of the
    layers that each worker has no place for."""
    if nowhere := set.intersection(*map(set, unplaced)):
        kinds = sorted({layer.kind for layer in shape.layers if layer.name in nowhere})
        raise not_served(f"{engine} has no place for the adapter of {', '.join(kinds)}")


def _adapted_layers(spec: JobSpec, asked: AskedAdapter) -> dict[str, tuple[int, int]]:
    """The layers of the job's model that get an adapter: inputs and outputs. Raises InvalidJob."""
    import torch
    from transformers import AutoConfig

    trust = spec.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(spec.model.path, trust_remote_code=trust)
        with torch.device("meta"):
            model: Any = loader_of(config).from_config(config, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise not_served(f"transformers does not build the model in {spec.model.path}: {error}") from error
    modules = dict(model.named_modules())
    head = next((name for name, part in modules.items() if part is model.get_output_embeddings()), "")
    linear = {
        name: (part.in_features, part.out_features)
        for name, part in modules.items()
        if type(part) is torch.nn.Linear and not is_router(name)
    }
    tower = [name for name in linear if f".{TOWER}" in name]
    # Only the trainer knows the layers of the model folder, which exclude_modules may name too.
    others = folder_names(asked.options.exclude_modules)
    without_head = [name for name in linear if name != head and name not in tower]
    chosen = asked.choose(without_head, linear.keys() & {head}, others, recurrent_layers(modules), tower)
    if head in chosen:
        raise not_served(f"engines serve no adapter of the model's head, {head}")
    return {name: linear[name] for name in chosen}
