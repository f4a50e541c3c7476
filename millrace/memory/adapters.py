"""Parameters of the adapters of a decoder's layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from millrace.lora import read_adapter_folder
from millrace.megatron.adapters import EXPERTS, WEIGHT
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.layers import LayerParameters, Matrix, linear_layers
from millrace.spec.lora import OF_EXPERTS, Lora, folder_names

FEED_FORWARD = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
"""Linear layers of a feed-forward network, and the fields of `ModelShape.names` with their names in a model folder."""
BY_COLUMNS = ("o_proj", "down_proj")
"""Layers that tensor-parallel ranks split by columns: a rank has its columns of A and all of B."""
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
"""Layers that every tensor-parallel rank has whole. Of all others it has all of A and its rows of B."""


def _of_experts(part: str) -> str:
    """How a choice names a layer of every routed expert, if one of Megatron's names means it."""
    return f"{EXPERTS}.*.{part}"


_FUSED = frozenset(_of_experts(part) for parts in OF_EXPERTS.values() for part in parts)


def without_experts(lora: Lora) -> Lora:
    """The same adapter for a backend whose routed experts have none."""
    names = lora.target_modules
    return lora if isinstance(names, str) else lora.model_copy(update={"target_modules": folder_names(names)})


@dataclass(frozen=True)
class _Choice:
    """Names, or ends of names after a dot, of the layers that have an adapter and of those that have none."""

    targets: frozenset[str] | None
    """None: every linear layer but those of routed experts."""
    excluded: frozenset[str] = frozenset()

    @property
    def has_experts(self) -> bool:
        return any(EXPERTS in name.split(".") for name in self.targets or ())

    def has(self, *layer: str, of_expert: str | None = None) -> bool:
        """Whether the layer of these whole names is among them; `of_expert`: which layer of a routed expert it is."""
        ends = {name.split(".", parts)[-1] for name in layer for parts in range(name.count(".") + 1)}
        if of_expert is not None:
            ends |= {EXPERTS, _of_experts(of_expert)}
            if not any(EXPERTS in name.split(".") and name not in _FUSED for name in self.targets or ()):
                return _of_experts(of_expert) in (self.targets or ()) and ends.isdisjoint(self.excluded)
        return (self.targets is None or not ends.isdisjoint(self.targets)) and ends.isdisjoint(self.excluded)


@dataclass(frozen=True)
class _Adapted:
    """Matrices of one size in one decoder layer that have an adapter."""

    name: str
    matrix: Matrix
    count: int
    of_expert: bool

    def parameters(self, lora: Lora, ranks: int) -> float:
        """Parameters on one of the tensor-parallel ranks that split the layer."""
        inputs: float = self.matrix[0]
        outputs: float = self.matrix[1]
        if self.name in BY_COLUMNS:
            inputs /= ranks
        elif self.name not in WHOLE:
            outputs /= ranks
        return self.count * (lora.rank * (inputs + outputs) + (outputs if lora.dora else 0))


def adapter_parameters(shape: ModelShape, lora: Lora) -> float:
    """Number of parameters of the adapters of all layers, and of the output head if it has one. Raises InvalidJob as
    `adapter_layers`."""
    return sum(layer.total for layer in adapter_layers(shape, lora)) + _of_head(shape, lora)


def active_adapter_parameters(shape: ModelShape, lora: Lora) -> float:
    """Number of parameters of the adapters that multiply each token: of routed experts only those that a token is sent
    to. Raises InvalidJob as `adapter_layers`."""
    layers, experts = adapter_layers(shape, lora), shape.experts
    share = 0.0 if experts is None else experts.per_token / experts.count
    return sum(layer.dense + share * layer.experts for layer in layers) + _of_head(shape, lora)


def adapter_layers(shape: ModelShape, lora: Lora, *, ranks: int = 1, expert_ranks: int = 1) -> list[LayerParameters]:
    """Number of parameters of the adapters of each layer: rank · (inputs + outputs) of each adapted matrix, with DoRA
    one more for each output. With `ranks` and `expert_ranks`, on one of the tensor-parallel ranks that split a layer,
    and a layer of an expert; experts that others hold are counted. An adapter that is trained further has the rank and
    the layers of its folder, if that is on this machine. Raises InvalidJob for a folder that cannot be used."""
    lora, choice = _asked(lora)
    return [
        LayerParameters(
            sum(each.parameters(lora, ranks) for each in adapted if not each.of_expert),
            sum(each.parameters(lora, expert_ranks) for each in adapted if each.of_expert),
        )
        for adapted in _adapted_layers(shape, choice)
    ]


def _of_head(shape: ModelShape, lora: Lora) -> float:
    """Parameters of the adapter of the output head, which all-linear does not mean."""
    lora, choice = _asked(lora)
    if choice.targets is None or shape.tied or not choice.has(shape.names.head.removesuffix(WEIGHT)):
        return 0.0
    return _Adapted("head", (shape.hidden, shape.vocabulary), 1, of_expert=False).parameters(lora, 1)


def _asked(lora: Lora) -> tuple[Lora, _Choice]:
    if lora.adapter_path is not None and Path(lora.adapter_path).is_dir():
        folder = read_adapter_folder(lora)
        return folder.options, _Choice(frozenset(folder.layers))
    asked, excluded = lora.target_modules, _names(lora.exclude_modules)
    return lora, _Choice(None if isinstance(asked, str) else _names(asked), excluded)


def _names(names: list[str]) -> frozenset[str]:
    of_experts = (_of_experts(part) for name in names for part in OF_EXPERTS.get(name, ()))
    return frozenset([*folder_names(names), *of_experts])


@lru_cache(maxsize=32)
def _adapted_layers(shape: ModelShape, choice: _Choice) -> tuple[tuple[_Adapted, ...], ...]:
    return tuple(
        (*_adapted(shape, layer, choice), *(_adapted_experts(shape, layer, choice) if choice.has_experts else ()))
        for layer in range(shape.layers)
    )


def _adapted(shape: ModelShape, layer: int, choice: _Choice) -> Iterator[_Adapted]:
    """The adapted matrices of one layer without its routed experts."""
    prefix, names = shape.names.layer.format(layer=layer), shape.names
    shared = "shared_" if shape.experts is not None and shape.has_experts(layer) else ""
    for name, matrix in linear_layers(shape, layer).items():
        whole = f"self_attn.{name}"
        if shape.has_recurrence(layer) and name not in FEED_FORWARD:
            continue  # such a layer has no adapter
        if name in FEED_FORWARD:
            whole = getattr(names, shared + FEED_FORWARD[name]).removesuffix(WEIGHT)
        if choice.has(prefix + whole, names.in_module(prefix + whole)):
            yield _Adapted(name, matrix, 1, of_expert=False)


def _adapted_experts(shape: ModelShape, layer: int, choice: _Choice) -> Iterator[_Adapted]:
    if (experts := shape.experts) is None or not shape.has_experts(layer):
        return
    prefix = shape.names.layer.format(layer=layer)
    for name, end in FEED_FORWARD.items():
        whole = prefix + getattr(shape.names, f"expert_{end}").removesuffix(WEIGHT)
        count = sum(choice.has(whole.format(expert=expert), of_expert=end) for expert in range(experts.count))
        matrix = (experts.ffn, shape.hidden) if end == "down" else (shape.hidden, experts.ffn)
        yield _Adapted(name, matrix, count, of_expert=True)
