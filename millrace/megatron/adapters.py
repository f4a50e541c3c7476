"""Adapters (LoRA, arXiv 2106.09685) of Megatron's linear layers: which layers of the model folder each of them fuses,
and which part of their matrices a rank holds. Torch-free.

A fused layer such as `linear_qkv` has one pair of matrices for each layer of the model folder in it, so an adapter is
the same whatever trains it. A is [rank, in], B is [out, rank]. If a layer is split by rows, a rank has all of A and
its rows of B; where it is split by columns, its columns of A and all of B. Each expert has matrices of its own.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Literal

from millrace.backends.megatron import MegatronOptions
from millrace.lora import AskedAdapter
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.placement import Piece, Placement, Tensor
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layers, Layout, layout, tensors
from millrace.spec.lora import MEGATRON_NAMES, OF_EXPERTS

Split = Literal["rows", "columns", "none"]

SPLITS: dict[str, Split] = {
    "linear_qkv": "rows",
    "linear_proj": "columns",
    "linear_fc1": "rows",
    "linear_fc2": "columns",
    "linear_q_proj": "rows",
    "linear_q_down_proj": "none",
    "linear_q_up_proj": "rows",
    "linear_kv_down_proj": "none",
    "linear_kv_up_proj": "rows",
}
"""Megatron's linear layers, and how tensor-parallel ranks split their weights."""
EXPERTS = "experts"
"""The name in `model.lora.target_modules` that means every linear layer of the routed experts."""
RECURRENT = ".linear_attn."
"""Part of the names of the layers inside a recurrence, which have no adapter."""
FUSED_ATTENTION = ("q_proj", "k_proj", "v_proj")
"""The layers in `linear_qkv`. A rank may have rows of some of them only; it has all their matrices A."""
WEIGHT = ".weight"
A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class AdapterPart:
    """The adapter of one layer of the model folder, as far as a rank holds it."""

    layer: str
    """Name of the layer in the model folder: `model.layers.0.self_attn.q_proj`."""
    inputs: int
    """Inputs of the whole layer."""
    outputs: int
    """Outputs of the whole layer; 0 where this rank has none of them."""
    columns: range
    """The inputs that this rank has."""
    rows: range
    """The outputs that this rank has."""

    @property
    def key(self) -> str:
        """Name of the part inside its Megatron layer: the last part of the layer's name."""
        return self.layer.rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of Megatron on one rank, with the adapters of the layers in it."""

    weight: str
    """Name of its weight in its chunk: `decoder.layers.0.self_attention.linear_qkv.weight`. A layer that holds the
    weights of several experts numbers them: `decoder.layers.0.mlp.experts.linear_fc1.weight3`."""
    parts: tuple[AdapterPart, ...]
    order: tuple[int, ...]
    """For each output of the Megatron layer on this rank the output of the parts, counted one part after the other. It
    is the number of all of them for an output that belongs to no part."""

    @property
    def name(self) -> str:
        """Name of the Megatron layer in its chunk."""
        return self.weight.rpartition(WEIGHT)[0]

    @property
    def number(self) -> str:
        """Number of the weight in a layer of several experts; empty in other layers."""
        return self.weight.rpartition(WEIGHT)[2]

    @property
    def of_expert(self) -> bool:
        """Whether this is a layer of a routed expert."""
        return _OF_EXPERT in self.weight

    @property
    def split(self) -> Split:
        return SPLITS[self.name.rpartition(".")[2]]

    def placements(self, rank: int) -> Iterator[tuple[str, Placement]]:
        """Name and place of each parameter, for adapters of this `rank`."""
        within = f"{ADAPTERS}.{self.number}" if self.number else ADAPTERS
        for part in self.parts:
            prefix = f"{self.name}.{within}.{part.key}."
            whole = Tensor(tensor_name(part.layer, A), (rank, part.inputs))
            extent = (rank, len(part.columns))
            yield prefix + A, Placement(extent, (Piece(whole, (0, part.columns.start), (0, 0), extent),))
            if part.rows:
                whole = Tensor(tensor_name(part.layer, B), (part.outputs, rank))
                extent = (len(part.rows), rank)
                yield prefix + B, Placement(extent, (Piece(whole, (part.rows.start, 0), (0, 0), extent),))


ADAPTERS = "adapters"
"""Name of the adapters inside their Megatron layer."""


def tensor_name(layer: str, matrix: str) -> str:
    """Name of a matrix in a module of PEFT, which is its name in checkpoints."""
    return f"{layer}.{matrix}.default.weight"


def linear_layers(shape: ModelShape, layers: Layers, *, experts: bool = False) -> tuple[str, ...]:
    """Names in the model folder of all layers that can have an adapter: those of the routed experts, or all others."""
    (everything,) = layout(shape, Topology(1, MegatronOptions()), 0, layers)
    found = [p.tensor.name for name, placed in everything.items() if _is_adaptable(name) for p in placed.pieces]
    found = [name for name in found if is_of_expert(name) == experts]
    return tuple(dict.fromkeys(name.removesuffix(WEIGHT) for name in found))


def is_of_expert(layer: str) -> bool:
    """Whether the layer of this name in the model folder belongs to a routed expert."""
    return f".{EXPERTS}." in layer


def choose_layers(asked: AskedAdapter, shape: ModelShape, layers: Layers) -> frozenset[str]:
    """The layers of the model folder that get the adapter that a job asks for. Raises InvalidJob."""
    if (folder := asked.folder) is not None:
        there = {shape.names.in_folder(layer): sizes for layer, sizes in folder.layers.items()}
        asked = replace(asked, folder=replace(folder, layers=there))
    linear, experts = linear_layers(shape, layers), linear_layers(shape, layers, experts=True)
    stored = [tensor.name for tensor in tensors(shape, Topology(1, MegatronOptions()), layers)]
    others = [*experts, *(name.removesuffix(WEIGHT) for name in (*stored, shape.names.head))]
    names = asked.options.target_modules if asked.folder is None else asked.folder.layers
    of_experts = names != "all-linear" and any(EXPERTS in name.split(".") for name in names)
    meant = experts if of_experts else ()
    for name, parts in OF_EXPERTS.items():
        own = {getattr(shape.names, f"expert_{part}").removesuffix(WEIGHT).rpartition(".")[2] for part in parts}
        fused = [layer for layer in experts if layer.rpartition(".")[2] in own]
        if name in names:
            meant = (*meant, *fused)
        plain = [layer for layer in linear if layer.rpartition(".")[2] in MEGATRON_NAMES[name]]
        asked = asked.naming(name, [*plain, *fused])
    recurrent = [layer for layer in others if RECURRENT in layer]
    return frozenset(asked.naming(EXPERTS, experts).choose(linear, tuple(dict.fromkeys(meant)), others, recurrent))


def adapted_linears(base: Layout, chosen: Set[str]) -> list[list[AdaptedLinear]]:
    """The linear layers of each chunk of a rank that have an adapter, if the layers `chosen` have one. `base` are
    the places of the rank's parameters."""
    return [
        [
            linear
            for name, placement in chunk.items()
            if _is_adaptable(name) and (linear := _adapted(name, placement, chosen)).parts
        ]
        for chunk in base
    ]


def adapter_layout(linears: list[list[AdaptedLinear]], rank: int) -> Layout:
    """The places of the adapters' parameters, for each chunk; `rank` is that of the adapters."""
    return [dict(placed for linear in chunk for placed in linear.placements(rank)) for chunk in linears]


_OF_EXPERT = ".mlp.experts."


def _is_adaptable(name: str) -> bool:
    layer, weight, number = name.rpartition(WEIGHT)
    return bool(weight) and layer.rpartition(".")[2] in SPLITS and (not number or number.isdigit())


def _adapted(name: str, placement: Placement, chosen: Set[str]) -> AdaptedLinear:
    pieces = sorted(placement.pieces, key=lambda piece: piece.target)
    held = dict.fromkeys(piece.tensor.name.removesuffix(WEIGHT) for piece in pieces)
    if name.endswith(f".linear_qkv{WEIGHT}"):
        parent = next(iter(held)).rpartition(".")[0]
        held = dict.fromkeys(f"{parent}.{part}" for part in FUSED_ATTENTION)
    inputs = pieces[0].tensor.shape[1]
    parts = [_part(layer, pieces, inputs) for layer in held if layer in chosen]
    firsts, total = {}, 0
    for part in parts:
        firsts[part.layer], total = total - part.rows.start, total + len(part.rows)
    order = [total] * placement.shape[0]
    for piece in pieces:
        first = firsts.get(piece.tensor.name.removesuffix(WEIGHT))
        if first is not None:
            begin, end = piece.target[0], piece.target[0] + piece.extent[0]
            order[begin:end] = range(first + piece.source[0], first + piece.source[0] + piece.extent[0])
    return AdaptedLinear(name, tuple(parts), tuple(order))


def _part(layer: str, pieces: list[Piece], inputs: int) -> AdapterPart:
    """A rank's rows of a layer are consecutive, as are its columns."""
    mine = [piece for piece in pieces if piece.tensor.name == layer + WEIGHT]
    if not mine:
        return AdapterPart(layer, inputs, 0, range(inputs), range(0))
    rows = range(mine[0].source[0], mine[-1].source[0] + mine[-1].extent[0])
    columns = range(mine[0].source[1], mine[0].source[1] + mine[0].extent[1])
    return AdapterPart(layer, inputs, mine[0].tensor.shape[0], columns, rows)
