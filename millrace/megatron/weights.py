"""The weight map: every parameter of every rank as boxes of Hugging Face tensors. Declarative and torch-free.

    layout(shape, topology, rank, TRANSFORMER_ENGINE)[chunk]["decoder.layers.0.self_attention.linear_qkv.weight"]

is a Placement. Names and splits are those of megatron-core 0.16 and 0.19. A rank that builds its model checks its
parameters against this map, so that a change in a new release is noticed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.architectures.shape import ExpertShape, LatentAttention, ModelShape, Recurrence
from millrace.megatron.placement import Placement, Tensor, stack
from millrace.megatron.topology import Coordinates, Topology
from millrace.weights.folder_tensors import Unread, stored_name

Layout = list[dict[str, Placement]]
"""For each model chunk of a rank: parameter name → placement."""

Named = Iterator[tuple[str, Placement]]


@dataclass(frozen=True)
class Layers:
    """The layer implementation that Megatron uses; implementations name and split some parameters differently."""

    fused_norms: bool
    """Whether a norm before a linear layer is a parameter of that layer."""
    grouped_experts: bool
    """Whether all experts of a rank are one module."""


TRANSFORMER_ENGINE = Layers(fused_norms=True, grouped_experts=True)
LOCAL = Layers(fused_norms=False, grouped_experts=False)


def layout(shape: ModelShape, topology: Topology, rank: int, layers: Layers) -> Layout:
    """The placements of the parameters that `rank` holds, for each model chunk."""
    at = topology.coordinates(rank)
    chunks = range(topology.options.virtual_pipeline)
    return [dict(_Chunk(shape, topology, at, layers, chunk).parameters()) for chunk in chunks]


def tensors(shape: ModelShape, topology: Topology, layers: Layers) -> tuple[Tensor, ...]:
    """All tensors of the model folder that are trained, layer by layer; the same for every topology."""
    one_rank = Topology(1, type(topology.options)())
    (everything,) = layout(shape, one_rank, 0, layers)
    pieces = (piece.tensor for placement in everything.values() for piece in placement.pieces)
    return tuple(dict.fromkeys(pieces))


def unread(shape: ModelShape, stored: Iterable[str]) -> Unread:
    """The tensors of a folder, `stored`, that no rank reads. A critic ignores the language model's head."""
    names, heads, stored = shape.names, (r"^lm_head\.", r"^score\.bias$"), frozenset(stored)
    taken = {stored_name(tensor.name, stored) for tensor in tensors(shape, Topology(1, MegatronOptions()), LOCAL)}
    tied = {names.head: stored_name(names.embedding, stored)} if shape.tied else {}
    ignored = (*names.untrained, *(heads if shape.value_head else ()))
    return Unread.of(stored, taken, tied=tied, ignored=ignored, layers=shape.layers)


@dataclass(frozen=True)
class _Chunk:
    shape: ModelShape
    topology: Topology
    at: Coordinates
    layers: Layers
    chunk: int

    def parameters(self) -> Named:
        stages, chunks = self.topology.options.pipeline_parallel, self.topology.options.virtual_pipeline
        first = self.at.pipeline == 0 and self.chunk == 0
        last = self.at.pipeline == stages - 1 and self.chunk == chunks - 1
        if first:
            yield "embedding.word_embeddings.weight", self._vocabulary(self.shape.names.embedding)
        mine = self.topology.layers_of(self.at.pipeline, self.chunk, self.shape.layers)
        for index, layer in enumerate(mine):
            prefix = f"decoder.layers.{index}."
            yield from ((prefix + name, placement) for name, placement in self._layer(layer))
        if last:
            yield "decoder.final_layernorm.weight", Placement.whole(self.shape.names.final_norm, self.shape.hidden)
        if last and self.shape.value_head:
            yield "output_layer.weight", Placement.whole(self.shape.names.value_head, 1, self.shape.hidden)
        elif last and not (first and self.shape.tied):
            head = self.shape.names.embedding if self.shape.tied else self.shape.names.head
            yield "output_layer.weight", self._vocabulary(head)

    def _vocabulary(self, name: str) -> Placement:
        s, parts = self.shape, self.topology.options.tensor_parallel
        rest = s.padded_vocabulary(parts) - s.vocabulary
        padded = stack([Placement.whole(name, s.vocabulary, s.hidden), Placement.padding(rest, s.hidden)])
        return padded.shard(0, self.at.tensor, parts)

    def _layer(self, layer: int) -> Named:
        prefix = self.shape.names.layer.format(layer=layer)
        recurrence = self.shape.recurrence if self.shape.has_recurrence(layer) else None
        fused = self.layers.fused_norms and self.shape.latent is None
        norm = Placement.whole(prefix + "input_layernorm.weight", self.shape.hidden)
        linear = "linear_qkv" if recurrence is None else "in_proj"
        yield (f"self_attention.{linear}.layer_norm_weight" if fused else "input_layernorm.weight"), norm
        if recurrence is not None:
            yield from self._recurrence(f"{prefix}linear_attn.", recurrence)
        else:
            yield from self._attention(prefix) if self.shape.latent is None else self._latent(prefix, self.shape.latent)
        experts = self.shape.experts if self.shape.has_experts(layer) else None
        fused = self.layers.fused_norms and experts is None
        norm = Placement.whole(prefix + "post_attention_layernorm.weight", self.shape.hidden)
        yield ("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"), norm
        yield from self._dense(prefix) if experts is None else self._experts(prefix, experts)

    def _attention(self, prefix: str) -> Named:
        s = self.shape
        yield "self_attention.linear_qkv.weight", self._query_key_value(prefix, "weight", s.hidden)
        if s.attention_bias:
            yield "self_attention.linear_qkv.bias", self._query_key_value(prefix, "bias")
        if s.query_key_norm:
            yield "self_attention.q_layernorm.weight", Placement.whole(f"{prefix}self_attn.q_norm.weight", s.head_dim)
            yield "self_attention.k_layernorm.weight", Placement.whole(f"{prefix}self_attn.k_norm.weight", s.head_dim)
        yield (
            "self_attention.linear_proj.weight",
            self._columns(f"{prefix}self_attn.o_proj.weight", s.hidden, s.heads * s.head_dim),
        )

    def _query_key_value(self, prefix: str, kind: str, *width: int) -> Placement:
        """Group by group: the query heads, their gates, the key head, the value head. Split by rows, also inside a
        group if there are fewer groups than tensor-parallel ranks. In the folder each gate follows its query head."""
        s, both = self.shape, 2 if self.shape.gated else 1
        q, k, v = (
            Placement.whole(f"{prefix}self_attn.{name}_proj.{kind}", heads * s.head_dim, *width)
            for name, heads in (("q", both * s.heads), ("k", s.key_value_heads), ("v", s.key_value_heads))
        )
        queries = [q]
        if s.gated:
            queries = [stack(q.shard(0, 2 * head + half, 2 * s.heads) for head in range(s.heads)) for half in range(2)]
        groups = s.key_value_heads
        parts = [tensor.shard(0, group, groups) for group in range(groups) for tensor in (*queries, k, v)]
        return stack(parts).shard(0, self.at.tensor, self.topology.options.tensor_parallel)

    def _recurrence(self, prefix: str, r: Recurrence) -> Named:
        """Each tensor-parallel rank has the same share of the key heads, and the value heads that belong to them."""
        part, parts = self.at.tensor, self.topology.options.tensor_parallel
        inputs = self._by_key_head(prefix, r) if r.by_key_head else self._by_projection(prefix, r)
        yield "self_attention.in_proj.weight", stack(each.shard(0, part, parts) for each in inputs)
        channels = Placement.whole(f"{prefix}conv1d.weight", r.channels, 1, r.window)
        yield "self_attention.conv1d.weight", stack(each.shard(0, part, parts) for each in _sections(channels, r))
        for name in ("dt_bias", "A_log"):
            yield f"self_attention.{name}", Placement.whole(prefix + name, r.value_heads).shard(0, part, parts)
        yield "self_attention.out_norm.weight", Placement.whole(f"{prefix}norm.weight", r.value_dim)
        yield (
            "self_attention.out_proj.weight",
            self._columns(f"{prefix}out_proj.weight", self.shape.hidden, r.value_width),
        )

    def _by_projection(self, prefix: str, r: Recurrence) -> list[Placement]:
        """Queries, keys, values, the gate of the output, rates and decays, each with its heads in order."""
        hidden = self.shape.hidden
        rows = {"qkv": r.channels, "z": r.value_width, "b": r.value_heads, "a": r.value_heads}
        whole = {name: Placement.whole(f"{prefix}in_proj_{name}.weight", n, hidden) for name, n in rows.items()}
        return [*_sections(whole.pop("qkv"), r), *whole.values()]

    def _by_key_head(self, prefix: str, r: Recurrence) -> list[Placement]:
        """The same, of tensors that have all of one key head after the other."""
        of_values, of_heads = r.value_width // r.key_heads, r.value_heads // r.key_heads
        wide = Placement.whole(f"{prefix}in_proj_qkvz.weight", r.channels + r.value_width, self.shape.hidden)
        narrow = Placement.whole(f"{prefix}in_proj_ba.weight", 2 * r.value_heads, self.shape.hidden)
        return [
            stack(placed.shard(0, head, r.key_heads).narrow(0, start, rows) for head in range(r.key_heads))
            for placed, sizes in ((wide, (r.key_dim, r.key_dim, of_values, of_values)), (narrow, (of_heads, of_heads)))
            for start, rows in zip(accumulate(sizes, initial=0), sizes, strict=False)
        ]

    def _latent(self, prefix: str, latent: LatentAttention) -> Named:
        s, attention = self.shape, f"{prefix}self_attn."
        query_dim, up_dim = latent.plain_dim + latent.rotary_dim, latent.plain_dim + latent.value_dim
        if latent.query_rank is None:
            yield (
                "self_attention.linear_q_proj.weight",
                self._rows(f"{attention}q_proj.weight", s.heads * query_dim, s.hidden),
            )
        else:
            yield (
                "self_attention.linear_q_down_proj.weight",
                Placement.whole(f"{attention}q_a_proj.weight", latent.query_rank, s.hidden),
            )
            yield self._latent_norm("q"), Placement.whole(f"{attention}q_a_layernorm.weight", latent.query_rank)
            yield (
                "self_attention.linear_q_up_proj.weight",
                self._rows(f"{attention}q_b_proj.weight", s.heads * query_dim, latent.query_rank),
            )
        yield (
            "self_attention.linear_kv_down_proj.weight",
            Placement.whole(
                f"{attention}kv_a_proj_with_mqa.weight", latent.key_value_rank + latent.rotary_dim, s.hidden
            ),
        )
        yield self._latent_norm("kv"), Placement.whole(f"{attention}kv_a_layernorm.weight", latent.key_value_rank)
        yield (
            "self_attention.linear_kv_up_proj.weight",
            self._rows(f"{attention}kv_b_proj.weight", s.heads * up_dim, latent.key_value_rank),
        )
        yield (
            "self_attention.linear_proj.weight",
            self._columns(f"{attention}o_proj.weight", s.hidden, s.heads * latent.value_dim),
        )

    def _latent_norm(self, of: str) -> str:
        fused = self.layers.fused_norms
        return (
            f"self_attention.linear_{of}_up_proj.layer_norm_weight"
            if fused
            else f"self_attention.{of}_layernorm.weight"
        )

    def _dense(self, prefix: str) -> Named:
        s, names = self.shape, self.shape.names
        yield "mlp.linear_fc1.weight", self._gate_up(prefix + names.gate, prefix + names.up, s.ffn)
        yield "mlp.linear_fc2.weight", self._columns(prefix + names.down, s.hidden, s.ffn)

    def _experts(self, prefix: str, experts: ExpertShape) -> Named:
        s, names = self.shape, self.shape.names
        yield "mlp.router.weight", Placement.whole(prefix + names.router, experts.count, s.hidden)
        if experts.bias:
            yield "mlp.router.expert_bias", Placement.whole(prefix + names.router_bias, experts.count)
        if experts.shared_ffn is not None:
            fc1 = self._gate_up(prefix + names.shared_gate, prefix + names.shared_up, experts.shared_ffn)
            yield "mlp.shared_experts.linear_fc1.weight", fc1
            fc2 = self._columns(prefix + names.shared_down, s.hidden, experts.shared_ffn)
            yield "mlp.shared_experts.linear_fc2.weight", fc2
        if experts.shared_gate:
            yield "mlp.shared_experts.gate_weight", Placement.whole(prefix + names.shared_output, 1, s.hidden)
        count = experts.count // self.topology.options.expert_parallel
        for index in range(count):
            expert = self.at.expert * count + index
            gate, up, down = (
                prefix + name.format(expert=expert) for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            part, parts = self.at.expert_tensor, self.topology.options.expert_tensor_size
            fc1 = stack(Placement.whole(name, experts.ffn, s.hidden).shard(0, part, parts) for name in (gate, up))
            yield self._expert_name("linear_fc1", index), fc1
            fc2 = Placement.whole(down, s.hidden, experts.ffn).shard(1, part, parts)
            yield self._expert_name("linear_fc2", index), fc2

    def _expert_name(self, linear: str, index: int) -> str:
        grouped = self.layers.grouped_experts
        return (
            f"mlp.experts.{linear}.weight{index}" if grouped else f"mlp.experts.local_experts.{index}.{linear}.weight"
        )

    def _gate_up(self, gate: str, up: str, ffn: int) -> Placement:
        return stack(self._rows(name, ffn, self.shape.hidden) for name in (gate, up))

    def _rows(self, name: str, rows: int, columns: int) -> Placement:
        return Placement.whole(name, rows, columns).shard(0, self.at.tensor, self.topology.options.tensor_parallel)

    def _columns(self, name: str, rows: int, columns: int) -> Placement:
        return Placement.whole(name, rows, columns).shard(1, self.at.tensor, self.topology.options.tensor_parallel)


def _sections(channels: Placement, r: Recurrence) -> list[Placement]:
    """The rows of queries, of keys and of values."""
    sizes = (r.key_width, r.key_width, r.value_width)
    return [channels.narrow(0, start, n) for start, n in zip(accumulate(sizes, initial=0), sizes, strict=False)]
