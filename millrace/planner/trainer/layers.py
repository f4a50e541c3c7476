"""Seconds of one decoder layer, and of the output head, for one micro-batch on one rank of the trainer."""

from dataclasses import dataclass

from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.layers import kept_elements, linear_layers
from millrace.planner import constants
from millrace.planner.hardware import Gpu, Links
from millrace.planner.trainer.layout import PLANNED, Cause, Imbalance, Layout, Seconds, added, scaled
from millrace.sequence_cost import STATE_PRODUCTS

ELEMENT = 2
"""Bytes of an element in forward and backward passes, bfloat16."""
BACKWARD = 2.0
"""Products of a backward pass over those of the forward pass: for the gradients of inputs and of weights."""
WITHOUT_WEIGHTS = 1.0
"""The same if the weights have no gradients (adapters)."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one data-parallel rank, or of the context-parallel ranks that share it."""

    tokens: float
    mean_pair_length: float
    """Σs²/Σs of its sequences."""


@dataclass(frozen=True)
class LayerTimes:
    """Times of the layers of one model on one kind of GPU."""

    gpu: Gpu
    shape: ModelShape
    layout: Layout
    batch: MicroBatch
    imbalance: Imbalance = PLANNED
    adapted: bool = False
    """Whether adapters are trained and the model's own weights are not."""

    @property
    def rate(self) -> float:
        """FLOP/s of the products of a layer."""
        return constants.LAYER_SHARE * self.gpu.product_rate

    @property
    def tokens(self) -> float:
        """Tokens on this rank before tensor parallelism divides the work."""
        return self.batch.tokens / self.layout.context

    @property
    def backward_products(self) -> float:
        return WITHOUT_WEIGHTS if self.adapted else BACKWARD

    def forward(self, layer: int) -> dict[Cause, float]:
        """Seconds of the forward pass of layer number `layer`."""
        shape, o = self.shape, self.layout
        experts = shape.experts if shape.has_experts(layer) else None
        dense = sum(inputs * outputs for inputs, outputs in linear_layers(shape, layer).values())
        routed = 0.0
        if experts is not None:
            fullest = self.imbalance.fullest(experts.count, o.expert)
            routed = fullest * 3 * shape.hidden * experts.ffn * experts.per_token
        attention = self._attention_flops(layer)
        share = constants.ATTENTION_SHARE[o.backend]
        travelling = constants.ELEMENTWISE_PASSES * kept_elements(shape, layer).total
        if self.adapted:
            travelling += constants.ADAPTER_PASSES * sum(map(sum, linear_layers(shape, layer).values()))
        memory = ELEMENT * self.tokens / o.tensor / (constants.MEMORY_SHARE * self.gpu.memory_rate)
        found = {
            Cause.PRODUCTS: 2 * (dense + routed) * self.tokens / o.tensor / self.rate,
            Cause.ATTENTION: attention * self.tokens / o.tensor / (share * self.rate),
            Cause.ELEMENTWISE: travelling * memory,
            Cause.TENSOR: self._tensor(routed=experts is not None) + self._context(),
        }
        if experts is not None:
            found[Cause.LAUNCHES] = 2 * experts.count / o.expert * constants.EXPERT_PRODUCT_S[o.backend]
            found[Cause.EXPERTS] = self._experts(fullest * experts.per_token)
        return found

    def backward(self, layer: int) -> dict[Cause, float]:
        """Seconds of the backward pass, with what it computes again."""
        forward = self.forward(layer)
        factors = {Cause.PRODUCTS: self.backward_products, Cause.EXPERTS: 1.0, Cause.TENSOR: 1.5}
        parts: list[Seconds] = [{cause: factors.get(cause, BACKWARD) * s for cause, s in forward.items()}]
        if self.layout.recomputed.everything:
            parts.append(forward)
        else:
            parts.append(scaled({Cause.PRODUCTS: forward[Cause.PRODUCTS]}, self._again(layer)))
        return added(parts)

    def _again(self, layer: int) -> float:
        """Share of a layer's products that selective recomputation repeats."""
        modules, shape = self.layout.recomputed.modules, self.shape
        sizes = {name: inputs * outputs for name, (inputs, outputs) in linear_layers(shape, layer).items()}
        ffn = sum(sizes.get(name, 0) for name in ("gate_proj", "up_proj", "down_proj"))
        experts = shape.experts if shape.has_experts(layer) else None
        routed = 0 if experts is None else 3 * shape.hidden * experts.ffn * experts.per_token
        again = (ffn if modules & {"mlp", "shared_experts", "moe"} else 0) + (routed if "moe" in modules else 0)
        return again / (sum(sizes.values()) + routed)

    def _attention_flops(self, layer: int) -> float:
        """FLOPs of a token of attention itself, or of a recurrence. Of all pairs of tokens half are computed."""
        if self.shape.recurrence is not None and self.shape.has_recurrence(layer):
            return 2.0 * STATE_PRODUCTS * self.shape.recurrence.state
        return self._attention_widths() * self.batch.mean_pair_length

    def _attention_widths(self) -> float:
        """Elements of all queries and values of a token: a pair of tokens costs 2 FLOPs for each."""
        latent = self.shape.latent
        if latent is None:
            return 2.0 * self.shape.heads * self.shape.head_dim
        return self.shape.heads * (latent.plain_dim + latent.rotary_dim + latent.value_dim)

    def _tensor(self, *, routed: bool) -> float:
        """Tokens are gathered before attention and before a dense network, and divided again after each."""
        o = self.layout
        if o.tensor == 1:
            return 0.0
        exchanges = 2 if routed and o.expert_tensor == 1 else 4
        return exchanges * Links(self.gpu).gathered(ELEMENT * self.shape.hidden * self.tokens, o.tensor)

    def _context(self) -> float:
        """Megatron passes keys and values around; Ulysses exchanges queries, keys, values and outputs."""
        o, shape = self.layout, self.shape
        if o.context == 1:
            return 0.0
        links, heads = Links(self.gpu), shape.key_value_heads
        if o.backend == "megatron":
            size = 2 * heads * shape.head_dim * ELEMENT * self.batch.tokens / o.tensor
            return links.gathered(size, o.context, stride=o.tensor)
        width = (2 * shape.heads + 2 * heads) * shape.head_dim
        return links.exchanged(width * ELEMENT * self.tokens, o.context)

    def _experts(self, per_token: float) -> float:
        """Tokens go to the ranks of their experts and come back."""
        o = self.layout
        sent = per_token * self.shape.hidden * ELEMENT * self.tokens / o.tensor
        return 2 * Links(self.gpu).exchanged(sent, o.expert, stride=o.expert_tensor)

    def head(self, *, backward: bool) -> dict[Cause, float]:
        """Seconds of the output head: its products, and reading and writing logits. The backward pass computes the
        logits again."""
        rows = 1 if self.shape.value_head else self.shape.vocabulary
        logits = rows * self.tokens / self.layout.tensor
        products, passes = (1.0 + self.backward_products, 2 * BACKWARD) if backward else (1.0, 1.0)
        memory = ELEMENT * constants.LOGIT_PASSES * logits / (constants.MEMORY_SHARE * self.gpu.memory_rate)
        return {Cause.HEAD: products * 2 * logits * self.shape.hidden / self.rate + passes * memory / 2}
