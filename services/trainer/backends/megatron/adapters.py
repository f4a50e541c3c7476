"""The adapter of a job: which layers of the policy get one and what it adds to their outputs, on the ranks that share
them; what is published and saved of it; and the weights with it added."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.adapters import (
    ADAPTERS,
    WEIGHT,
    A,
    AdaptedLinear,
    AdapterPart,
    B,
    adapted_linears,
    adapter_layout,
    is_of_expert,
)
from millrace.megatron.architectures.shape import ModelShape, Names
from millrace.megatron.placement import Placement
from millrace.megatron.placement import Tensor as PlacedTensor
from millrace.megatron.rules import check_adapter
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layers, Layout, layout, tensors
from millrace.spec.lora import Lora
from millrace.weights.plans.manifest import Content
from services.trainer.backends.lora import configuration, first_a, settings_of, stored_values, target_names
from services.trainer.backends.megatron.published import GatherPlan, PublishedPart
from services.trainer.protocol.adapter import AdapterSettings, stored_name

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass
class AdapterMode:
    """Whether the adapters of a model take part, and whether their dropout does."""

    enabled: bool = True
    dropping: bool = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Computes without the adapters: with the model as it was before training."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    @contextmanager
    def training(self) -> Iterator[None]:
        """Computes with dropout. Only an update does: a policy samples without."""
        self.dropping = True
        try:
            yield
        finally:
            self.dropping = False


@dataclass(frozen=True)
class AdapterShape:
    """What all adapters of a model have in common."""

    rank: int
    scale: float
    dropout: float
    dtype: torch.dtype
    sequence_parallel: bool
    """Whether tensor-parallel ranks have different tokens between the layers."""


class Pair(nn.Module):
    """The matrices of one layer of the model folder, as far as this rank holds them."""

    def __init__(self, part: AdapterPart, shape: AdapterShape, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(shape.rank, len(part.columns), dtype=shape.dtype, device=device))
        rows = torch.zeros(len(part.rows), shape.rank, dtype=shape.dtype, device=device)
        self.lora_B = nn.Parameter(rows) if part.rows else None


class LayerAdapter(nn.ModuleDict):
    """The adapters of the layers that one linear layer of Megatron fuses, each with its own matrices.

    All of them are computed at once: their matrices A one below the other, [n·rank, in], and their matrices B in
    blocks, [out, n·rank]. A layer that is split by rows has all of A on every rank, so every rank computes the small
    products of its own tokens, and these are gathered. One that is split by columns has all of B: the small products
    of the ranks are summed.

    Experts exchange nothing: their tokens are exchanged before and after them, for their weights and adapters alike.
    """

    def __init__(self, linear: AdaptedLinear, shape: AdapterShape, mode: AdapterMode, device: torch.device) -> None:
        super().__init__({part.key: Pair(part, shape, device) for part in linear.parts})
        self._split, self._shape, self._mode = linear.split, shape, mode
        self._of_expert = linear.of_expert
        self.weight = linear.weight
        straight = linear.order == tuple(range(len(linear.order)))
        self._order = None if straight else torch.tensor(linear.order, device=device)
        self._padded = any(row == sum(len(part.rows) for part in linear.parts) for row in linear.order)
        # Each rank has the gradient from its own tokens: Megatron sums those of the parameters so marked.
        by_tokens = shape.sequence_parallel and not linear.of_expert
        for name, parameter in self.named_parameters():
            sharded = "columns" if name.endswith("lora_A") else "rows"
            setattr(parameter, "sequence_parallel", by_tokens and self._split != sharded)  # noqa: B010

    @property
    def enabled(self) -> bool:
        return self._mode.enabled

    def forward(self, hidden: Tensor) -> Tensor:
        """What is added to the layer's output, for its input `hidden` [..., in]."""
        if self._shape.dropout and self._mode.dropping:
            hidden = F.dropout(hidden, self._shape.dropout)
        return F.linear(self._exchanged(F.linear(hidden, self.matrix_a())), self.matrix_b())

    def matrix_a(self) -> Tensor:
        """[n·rank, in] of this rank."""
        whole = torch.cat([pair.lora_A for pair in self._pairs()])
        return self._shared(whole) if self._split != "columns" else whole

    def matrix_b(self) -> Tensor:
        """[out of this rank, n·rank], times the scale."""
        none = next(self.parameters()).new_zeros(0, self._shape.rank)
        blocks = torch.block_diag(*(none if pair.lora_B is None else pair.lora_B for pair in self._pairs()))
        if self._padded:
            blocks = F.pad(blocks, (0, 0, 0, 1))
        if self._order is not None:
            blocks = blocks.index_select(0, self._order)
        scaled: Tensor = blocks * self._shape.scale
        return self._shared(scaled) if self._split != "rows" else scaled

    def _exchanged(self, small: Tensor) -> Tensor:
        """The products with A of all tokens or of all columns that this rank needs."""
        if self._split == "none" or self._of_expert:
            return small
        by_tokens = self._shape.sequence_parallel
        if self._split == "rows":
            exchange = gather_from_sequence_parallel_region if by_tokens else copy_to_tensor_model_parallel_region
        elif by_tokens:
            exchange = reduce_scatter_to_sequence_parallel_region
        else:
            exchange = reduce_from_tensor_model_parallel_region
        exchanged: Tensor = exchange(small)
        return exchanged

    def _shared(self, whole: Tensor) -> Tensor:
        """A matrix that all ranks of a split expert have, with the sum of their gradients."""
        if not self._of_expert:
            return whole
        shared: Tensor = copy_to_tensor_model_parallel_region(whole, parallel_state.get_expert_tensor_parallel_group())
        return shared

    def _pairs(self) -> list[Pair]:
        return list(self.values())  # type: ignore[arg-type]  # a ModuleDict is not generic


def attach(chunk: nn.Module, linears: Sequence[AdaptedLinear], shape: AdapterShape, mode: AdapterMode) -> None:
    """Freezes a chunk and adds adapters to its layers, with all values 0."""
    device = next(chunk.parameters()).device
    chunk.requires_grad_(False)
    for linear in linears:
        layer, adapter = chunk.get_submodule(linear.name), LayerAdapter(linear, shape, mode, device)
        base = layer.get_parameter(linear.weight.rpartition(".")[2])
        for parameter in adapter.parameters():  # whether data parallelism is that of dense layers or of experts
            setattr(parameter, "allreduce", getattr(base, "allreduce", True))  # noqa: B010
        if not linear.number:
            layer.add_module(ADAPTERS, adapter)
            layer.register_forward_hook(_add)
        elif hasattr(layer, ADAPTERS):
            layer.get_submodule(ADAPTERS).add_module(linear.number, adapter)
        else:
            layer.add_module(ADAPTERS, nn.ModuleDict({linear.number: adapter}))
            layer.register_forward_hook(_add_to_experts)
    if (embedding := getattr(chunk, "embedding", None)) is not None:
        embedding.register_forward_hook(_with_gradient)


def _add(layer: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
    """Forward hook of a layer, which returns its output and a bias that was not added."""
    adapter: LayerAdapter = layer.adapters
    if not adapter.enabled:
        return None
    hidden = inputs[0]
    if (norm := getattr(layer, "layer_norm_weight", None)) is not None:  # a norm that Transformer Engine fused
        hidden = F.rms_norm(hidden, norm.shape, norm, layer.eps)
    return outputs[0] + adapter(hidden), outputs[1]


def _add_to_experts(layer: Any, inputs: tuple[Tensor, Sequence[int]], outputs: tuple[Tensor, Tensor | None]) -> Any:
    """Forward hook of a layer that holds the weights of several experts. Its inputs are their tokens, expert by expert,
    and how many each has."""
    adapters: list[LayerAdapter] = [layer.adapters[number] for number in sorted(layer.adapters, key=int)]
    if not adapters[0].enabled:
        return None
    tokens = inputs[0].split([int(count) for count in inputs[1]])
    added = [adapter(own) for adapter, own in zip(adapters, tokens, strict=True)]
    return outputs[0] + torch.cat(added), outputs[1]


def _with_gradient(embedding: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    """Forward hook of a frozen embedding. Layers that are computed again in the backward pass have no gradient unless
    their input has one, and a pipeline stage sends one to the stage before."""
    return hidden.requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden


@dataclass(frozen=True)
class AdapterPlan:
    """The adapter that a job asks for, of a model of one shape."""

    config: "LoraConfig"
    settings: AdapterSettings
    chosen: frozenset[str]
    """The layers of the model folder that have an adapter."""
    tensors: tuple[PlacedTensor, ...]
    """Its tensors, by their names in a module of PEFT that has the names of the model folder."""
    names: Names
    stored: Path | None
    """The PEFT folder whose adapter is trained further."""
    seed: int
    init: str
    """`model.lora.init`."""

    @classmethod
    def of(cls, lora: Lora, shape: ModelShape, layers: Layers, options: MegatronOptions, seed: int) -> Self:
        """Raises InvalidJob if there is no such layer, and for what Megatron's layers do not compute."""
        chosen, config = check_adapter(lora, options, shape, layers), configuration(lora)
        settings = settings_of(config)
        every = {tensor.name.removesuffix(WEIGHT) for tensor in tensors(shape, Topology(1, MegatronOptions()), layers)}
        of_experts = any(map(is_of_expert, chosen))
        config.target_modules = sorted(chosen) if of_experts else target_names(chosen, every - chosen)
        if shape.names.module != Names.module:  # other parts of the module have layers of the same last names
            config.target_modules = sorted(map(shape.names.in_module, chosen))
        alone = layout(shape, Topology(1, MegatronOptions()), 0, layers)
        (places,) = adapter_layout(adapted_linears(alone, chosen), settings.rank)
        found = (piece.tensor for placement in places.values() for piece in placement.pieces)
        stored = None if lora.adapter_path is None else Path(lora.adapter_path)
        return cls(config, settings, chosen, tuple(dict.fromkeys(found)), shape.names, stored, seed, lora.init)

    def stored_name(self, name: str) -> str:
        """Name in a PEFT folder of one of its tensors: PEFT has the names of the transformers module."""
        return stored_name(self.names.in_module(name))

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole adapter."""
        return sum(tensor.numel for tensor in self.tensors)

    def layout(self, base: Layout) -> Layout:
        """The places of the adapters' parameters on the rank whose other parameters are at `base`."""
        return adapter_layout(adapted_linears(base, self.chosen), self.settings.rank)

    def attach(self, chunks: Sequence[Any], base: Layout) -> AdapterMode:
        """Freezes the chunks of this rank and adds the adapters to them, with all values 0."""
        mode, config = AdapterMode(), chunks[0].config
        dropout, by_tokens = self.config.lora_dropout, config.sequence_parallel
        shape = AdapterShape(self.settings.rank, self.settings.scale, dropout, config.params_dtype, by_tokens)
        for chunk, linears in zip(chunks, adapted_linears(base, self.chosen), strict=True):
            attach(chunk, linears, shape, mode)
        return mode

    def first_values(self, places: Layout) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """For each chunk the parameters at `places` with their first values, float32, in host memory. Raises
        InvalidJob for a folder with another adapter."""
        stored: dict[str, Tensor] = {}
        if self.stored is not None:
            shapes = {self.stored_name(tensor.name): tensor.shape for tensor in self.tensors}
            stored = stored_values(self.stored, shapes)
        for chunk in places:
            yield ((name, self._first_value(placement, stored)) for name, placement in chunk.items())

    def _first_value(self, placement: Placement, stored: Mapping[str, Tensor]) -> Tensor:
        (piece,) = placement.pieces
        name = self.stored_name(piece.tensor.name)
        if stored:
            whole = stored[name]
        elif f".{A}." in name:
            whole = first_a(name, piece.tensor.shape, self.init, self.seed)
        else:
            return torch.zeros(placement.shape)
        box = tuple(slice(first, first + count) for first, count in zip(piece.source, piece.extent, strict=True))
        return whole[box]


class PolicyAdapter:
    """Implements `services.trainer.protocol.adapter.Adapter`."""

    def __init__(self, plan: AdapterPlan, parts: Mapping[Content, PublishedPart], parameters: PublishedPart) -> None:
        """`parameters` are the adapter's as they are trained."""
        self.settings = plan.settings
        self.config = plan.config
        self.parts = parts
        self._parameters = parameters

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        for info, whole in self._parameters.export("float32"):
            yield info.name, whole


def in_folder(plan: AdapterPlan, layout: Layout) -> Layout:
    """The places of an adapter's parameters under the names that its tensors have in a PEFT folder."""

    def stored(placed: Placement) -> Placement:
        return replace(
            placed, pieces=tuple(replace(piece, tensor=_stored(plan, piece.tensor)) for piece in placed.pieces)
        )

    return [{name: stored(placed) for name, placed in chunk.items()} for chunk in layout]


def gather_plan(plan: AdapterPlan, layouts: Sequence[Layout]) -> GatherPlan:
    """Which rank gives which box of the adapter. `layouts` are the places on every rank, as in a PEFT folder."""
    return GatherPlan.of_layouts([_stored(plan, tensor) for tensor in plan.tensors], layouts)


def _stored(plan: AdapterPlan, tensor: PlacedTensor) -> PlacedTensor:
    return replace(tensor, name=plan.stored_name(tensor.name))


class ScaledParameters:
    """The parameters of chunks, each matrix B times the adapter's scale: a copy of B, in the same memory every time."""

    def __init__(self, chunks: Sequence[nn.Module], scale: float) -> None:
        self._parameters = [dict(chunk.named_parameters()) for chunk in chunks]
        self._scale = scale
        self._scaled = [
            {name: torch.empty_like(parameter) for name, parameter in chunk.items() if name.endswith(f".{B}")}
            for chunk in self._parameters
        ]

    @torch.no_grad()
    def __call__(self) -> list[dict[str, Tensor]]:
        for parameters, copies in zip(self._parameters, self._scaled, strict=True):
            for name, copied in copies.items():
                torch.mul(parameters[name], self._scale, out=copied)
        return [{**parameters, **copies} for parameters, copies in zip(self._parameters, self._scaled, strict=True)]


def merged_weights(chunk: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The weights of a chunk that have an adapter, by name: each function computes one with its adapter added, float32,
    as far as this rank holds it."""
    parameters = dict(chunk.named_parameters())
    adapters = (part for part in chunk.modules() if isinstance(part, LayerAdapter))
    return {adapter.weight: partial(_merged, parameters[adapter.weight], adapter) for adapter in adapters}


@torch.no_grad()
def _merged(weight_oi: Tensor, adapter: LayerAdapter) -> Tensor:
    added_oi: Tensor = adapter.matrix_b().float() @ adapter.matrix_a().float()
    return weight_oi.float() + added_oi
