"""What an adapter adds to the output of a linear layer, on the ranks that share the layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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

from millrace.megatron.adapters import ADAPTERS, AdaptedLinear, AdapterPart


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
