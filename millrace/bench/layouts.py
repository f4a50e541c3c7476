"""The layouts that a benchmark uses: a trainer's ranks, as Megatron or FSDP2 shard a model, and an engine's workers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidJob
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import TRANSFORMER_ENGINE, layout, tensors
from millrace.weights.loader.learn import learn_layout
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.memory import Memory

OPTIONS = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "cp": "context_parallel",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
}
PADDED = 64
"""Engines pad the vocabulary to multiples of this."""


def numbers(text: str) -> dict[str, int]:
    """Parses sizes: "tp=2,ep=4" → {"tp": 2, "ep": 4}. Raises InvalidJob for another format."""
    try:
        return {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(",") if part)}
    except ValueError as error:
        raise InvalidJob(f"{text!r} is no layout.", "write it as tp=2,ep=4.") from error


def manifest(shape: ModelShape, dtype: str = "bfloat16") -> Manifest:
    alone = Topology(1, MegatronOptions())
    kept = shape.names.router_bias
    return Manifest(
        tuple(
            TensorInfo(t.name, t.shape, "float32" if t.name.endswith(kept) else dtype)
            for t in tensors(shape, alone, TRANSFORMER_ENGINE)
        )
    )


@dataclass(frozen=True)
class TrainerLayout:
    """A trainer. `text` has Megatron's sizes tp, pp, vpp, ep, etp, cp and dp; or fsdp: that many ranks, in float32,
    split by rows."""

    shape: ModelShape
    text: str

    @property
    def asked(self) -> dict[str, int]:
        return numbers(self.text)

    @property
    def ranks(self) -> int:
        if "fsdp" in self.asked:
            return self.asked["fsdp"]
        dense = [self.asked.get(name, 1) for name in ("tp", "cp", "pp")]
        experts = [self.asked.get("ep", 1), self.asked.get("etp", self.asked.get("tp", 1)), self.asked.get("pp", 1)]
        needed = max(_product(dense), _product(experts))
        return max(needed, _product(dense) * self.asked.get("dp", 1))

    def memory(self, rank: int, published: Manifest, device: torch.device) -> Memory:
        if "fsdp" in self.asked:
            return self._split(rank, published, device)
        number = {tensor.name: i for i, tensor in enumerate(published.tensors)}
        options = MegatronOptions.model_validate(
            {OPTIONS[name]: value for name, value in self.asked.items() if name != "dp"}
        )
        topology = Topology(self.ranks, options)
        places: list[Place] = []
        buffers: list[torch.Tensor] = []
        for chunk in layout(self.shape, topology, rank, TRANSFORMER_ENGINE):
            for placement in chunk.values():
                strides = row_major_strides(placement.shape)
                kinds = {published.tensors[number[p.tensor.name]].dtype for p in placement.pieces}
                for p in placement.pieces:
                    start = sum(t * s for t, s in zip(p.target, strides, strict=True))
                    places.append(Place(number[p.tensor.name], p.source, p.extent, len(buffers), start, strides))
                dtype = getattr(torch, kinds.pop() if kinds else "bfloat16")
                buffers.append(torch.empty(placement.shape, dtype=dtype, device=device))
        return Memory(published, Layout.of(places, published), buffers)

    def _split(self, rank: int, published: Manifest, device: torch.device) -> Memory:
        places: list[Place] = []
        buffers: list[torch.Tensor] = []
        for i, info in enumerate(published.tensors):
            rows = -(-info.shape[0] // self.ranks)
            first, last = min(info.shape[0], rank * rows), min(info.shape[0], (rank + 1) * rows)
            extent = (last - first, *info.shape[1:])
            places.append(Place(i, (first, *[0] * len(info.shape[1:])), extent, i, 0, row_major_strides(extent)))
            buffers.append(torch.empty(extent, dtype=torch.float32, device=device))
        return Memory(published, Layout.of(places, published), buffers)


@dataclass(frozen=True)
class ReplicaLayout:
    """A replica. `text` has tp, the number of workers. With ep=1 each expert is whole on one worker; otherwise it is
    split over all workers."""

    shape: ModelShape
    text: str

    @property
    def ranks(self) -> int:
        return numbers(self.text).get("tp", 1)

    def memory(self, rank: int, published: Manifest, device: torch.device) -> Memory:
        """A worker's memory as an engine has it: query, key and value fused, gate and up, all experts of a layer. The
        layout is learned from the loader, as a replica does."""
        if self.shape.latent is not None:
            raise InvalidJob("this bench's engine knows no latent attention.", "use millrace bench plan.")
        engine = Engine(self.shape, rank, self.ranks, bool(numbers(self.text).get("ep")), device)
        padded = frozenset(name for name in engine.parameters if "embed" in name or "head" in name)
        return learn_layout(engine.load, published, engine.parameters, padded).memory


class Engine:
    """One worker's parameters and loader, of a Qwen3-like model."""

    def __init__(self, shape: ModelShape, rank: int, ranks: int, whole_experts: bool, device: torch.device) -> None:
        self.shape, self.rank, self.ranks, self.whole_experts = shape, rank, ranks, whole_experts
        self.parameters: dict[str, torch.Tensor] = {}
        self._device = device
        self.kept_heads = max(1, shape.key_value_heads // ranks)
        rows = -(-shape.vocabulary // (PADDED * ranks)) * PADDED
        self._add("embed", rows, shape.hidden)
        if not shape.tied:
            self._add("head", rows, shape.hidden)
        self._add("norm", shape.hidden)
        for layer in range(shape.layers):
            self._layer(f"{layer}.", layer)

    def _add(self, name: str, *extent: int) -> None:
        self.parameters[name] = torch.empty(extent, dtype=torch.bfloat16, device=self._device)

    def _layer(self, prefix: str, layer: int) -> None:
        s, ranks = self.shape, self.ranks
        query = s.heads * s.head_dim // ranks
        self._add(prefix + "qkv", query + 2 * self.kept_heads * s.head_dim, s.hidden)
        self._add(prefix + "o", s.hidden, query)
        for name in ("input_norm", "post_norm"):
            self._add(prefix + name, s.hidden)
        for name in ("q_norm", "k_norm"):
            self._add(prefix + name, s.head_dim)
        if s.has_experts(layer):
            assert s.experts is not None
            count, ffn = self._experts()
            self._add(prefix + "router", s.experts.count, s.hidden)
            self._add(prefix + "w13", count, 2 * ffn, s.hidden)
            self._add(prefix + "w2", count, s.hidden, ffn)
        else:
            self._add(prefix + "gate_up", 2 * s.ffn // ranks, s.hidden)
            self._add(prefix + "down", s.hidden, s.ffn // ranks)

    def _experts(self) -> tuple[int, int]:
        """The number of experts on this worker, and the width of each that it has."""
        assert self.shape.experts is not None
        if self.whole_experts:
            return self.shape.experts.count // self.ranks, self.shape.experts.ffn
        return self.shape.experts.count, self.shape.experts.ffn // self.ranks

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        names = self.shape.names
        top: Mapping[str, str] = {names.embedding: "embed", names.head: "head", names.final_norm: "norm"}
        for name, tensor in weights:
            if name in top:
                self._top(top[name], tensor)
                continue
            layer, _, rest = name.removeprefix(names.layer.split("{")[0]).partition(".")
            self._load(f"{layer}.", rest, tensor)

    def _top(self, name: str, tensor: torch.Tensor) -> None:
        target = self.parameters[name]
        if name != "norm":
            tensor = tensor[self.rank * target.shape[0] : (self.rank + 1) * target.shape[0]]
        target[: tensor.shape[0]].copy_(tensor)

    def _load(self, prefix: str, name: str, tensor: torch.Tensor) -> None:
        p, part = self.parameters, name.removesuffix(".weight").rpartition(".")[2]
        if ".experts." in name:
            self._expert(prefix, int(name.split(".")[2]), part, tensor)
        elif part in ("q_proj", "k_proj", "v_proj"):
            self._query_key_value(p[prefix + "qkv"], part[0], tensor)
        elif part in ("gate_proj", "up_proj"):
            rows = tensor.shape[0] // self.ranks
            p[prefix + "gate_up"].narrow(0, rows * (part == "up_proj"), rows).copy_(self._part(tensor, 0))
        elif part in ("o_proj", "down_proj"):
            p[prefix + part.removesuffix("_proj")].copy_(self._part(tensor, 1))
        else:
            other = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm", "gate": "router"}
            p[prefix + other.get(part, part)].copy_(tensor)

    def _query_key_value(self, target: torch.Tensor, which: str, tensor: torch.Tensor) -> None:
        query = self.shape.heads * self.shape.head_dim // self.ranks
        kept = self.kept_heads * self.shape.head_dim
        if which == "q":
            target[:query].copy_(self._part(tensor, 0))
            return
        shared = max(1, self.ranks // self.shape.key_value_heads)
        first = self.rank // shared * kept
        target.narrow(0, query + kept * (which == "v"), kept).copy_(tensor[first : first + kept])

    def _expert(self, prefix: str, expert: int, part: str, tensor: torch.Tensor) -> None:
        count, ffn = self._experts()
        index = expert - self.rank * count if self.whole_experts else expert
        if not 0 <= index < count:
            return
        if part == "down_proj":
            self.parameters[prefix + "w2"][index].copy_(tensor if self.whole_experts else self._part(tensor, 1))
        else:
            target = self.parameters[prefix + "w13"][index].narrow(0, ffn * (part == "up_proj"), ffn)
            target.copy_(tensor if self.whole_experts else self._part(tensor, 0))

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * length, length)


def _product(values: Iterable[Any]) -> int:
    total = 1
    for value in values:
        total *= value
    return total
