"""Memory of a rank of the fsdp2 backend."""

from dataclasses import dataclass

from millrace.backends.fsdp2 import Fsdp2Options, parse
from millrace.fsdp2.sequence_parallel import check
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.head import head_bytes, scoring_bytes
from millrace.memory.layers import (
    adapter_parameters,
    kept_elements,
    layer_parameters,
    parameters,
    vocabulary_parameters,
)
from millrace.memory.ledger import Ledger, Part, Phase, Prediction, fullest
from millrace.memory.staging import sender_bytes
from millrace.spec import JobSpec
from millrace.spec.trainer import ROLES, Role

FLOAT32 = 4
MOMENTS = 2 * FLOAT32
PREFETCHED = 2
"""Layers that are whole at a time: the one that computes and the one that is gathered ahead."""

ON_DEVICE = 2
"""Layers whose activations are on the device with `offload_activations`."""


@dataclass(frozen=True)
class Fsdp2Memory:
    """One model on one rank. Sizes are bytes, `tokens` those of a micro-batch on this rank."""

    spec: JobSpec
    options: Fsdp2Options
    shape: ModelShape
    ranks: int
    tokens: int

    @property
    def element(self) -> int:
        """Bytes of an element in forward and backward passes."""
        return 2 if self.spec.trainer.dtype == "bfloat16" else FLOAT32

    @property
    def shards(self) -> int:
        return self.options.fsdp_size or self.ranks

    @property
    def adapted(self) -> bool:
        return self.spec.model.lora is not None

    def state(self) -> dict[Part, float]:
        """What is kept for the policy at the end of a backward pass: float32 weights, gradients and moments, divided
        over the ranks. With an adapter the weights have the dtype of the pass, and only the adapter is trained."""
        count = parameters(self.shape) / self.shards
        if self.spec.model.lora is None:
            return {
                Part.WEIGHTS: FLOAT32 * count,
                Part.GRADIENTS: FLOAT32 * count,
                Part.OPTIMIZER: MOMENTS * count,
            }
        adapter = adapter_parameters(self.shape, self.spec.model.lora) / self.shards
        return {Part.WEIGHTS: self.element * count, Part.ADAPTER: (2 * FLOAT32 + MOMENTS) * adapter}

    def of_role(self, role: Role) -> Fsdp2Options:
        """The options that hold for reference or critic."""
        return parse(self.spec.trainer.of(role).backend_options)

    def shards_of(self, role: Role) -> int:
        """Ranks that share one copy of reference or critic."""
        return self.of_role(role).fsdp_size or self.ranks

    def others(self) -> dict[Part, float]:
        """What is kept for reference and critic."""
        found: dict[Part, float] = {}
        if self.spec.algorithm.kl is not None and not self.adapted:
            found[Part.REFERENCE] = self.element * parameters(self.shape) / self.shards_of("reference")
        if self.spec.algorithm.critic is not None:
            whole = (2 * FLOAT32 + MOMENTS) * parameters(self.shape.as_critic())
            found[Part.CRITIC] = whole / self.shards_of("critic")
        return found

    def placed(self, kept: dict[Part, float], passing: dict[Part, float]) -> Ledger:
        """The ledger with what is offloaded in host memory."""
        policy = {Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.ADAPTER}
        offloaded = policy if self.options.offload_parameters else set()
        for role, part in zip(ROLES, (Part.REFERENCE, Part.CRITIC), strict=True):
            if self.of_role(role).offload_parameters:
                offloaded = offloaded | {part}
        if self.options.offload_optimizer:
            offloaded = offloaded | {Part.OPTIMIZER}
        return Ledger(
            {**{part: size for part, size in kept.items() if part not in offloaded}, **passing},
            {part: size for part, size in kept.items() if part in offloaded},
        )

    def layers(self) -> list[float]:
        """Parameters of each layer."""
        return [layer_parameters(self.shape, layer).total for layer in range(self.shape.layers)]

    def kept_activations(self) -> list[float]:
        """Bytes that one forward pass keeps of each layer without recomputation. What experts return is kept too, for
        the gradient of their weights."""
        sizes = []
        for layer in range(self.shape.layers):
            kept = kept_elements(self.shape, layer)
            sizes.append(self.element * self.tokens * (kept.total + kept.sent))
        return sizes

    def update(self) -> Ledger:
        """The peak of forward and backward. It is either in the backward pass of the head, when all activations are
        kept, or in that of the last layer, when its gradients are divided over the ranks."""
        root, layers = self.element * vocabulary_parameters(self.shape), self.layers()
        kept, whole = self.kept_activations(), PREFETCHED * self.element * max(layers)
        one_layer = max(kept)
        if self.spec.trainer.activation_recompute:
            kept = [self.element * self.tokens * self.shape.hidden for _ in kept]
        if self.options.offload_activations:
            kept = kept[-ON_DEVICE:]
        vocabulary, chunk = self.shape.vocabulary, min(self.options.logprob_chunk_tokens, self.tokens)
        head = {
            Part.GATHERED: root + whole / PREFETCHED,
            Part.ACTIVATIONS: sum(kept),
            Part.LOGITS: head_bytes(vocabulary, self.shape.hidden, chunk, self.element),
        }
        reduced = 0.0 if self.adapted else max(layers) * (self.element + FLOAT32 + FLOAT32 / self.shards)
        last = {
            Part.GATHERED: root + whole + reduced + (0.0 if self.adapted else root / (1 if self.shape.tied else 2)),
            Part.ACTIVATIONS: sum(kept) - kept[-1] + one_layer,
        }
        state = {**self.state(), **self.others()}
        return fullest([self.placed(state, head), self.placed(state, last)])

    def scoring(self) -> Ledger:
        """The peak of a forward pass: there are no gradients yet, and one layer's activations at a time."""
        kept = self.state()
        kept.pop(Part.GRADIENTS, None)
        chunk = min(self.options.logprob_chunk_tokens, self.tokens)
        passing = {
            Part.GATHERED: self.element * (vocabulary_parameters(self.shape) + PREFETCHED * max(self.layers())),
            Part.ACTIVATIONS: max(self.kept_activations()),
            Part.LOGITS: scoring_bytes(self.shape.vocabulary, chunk, self.element),
        }
        return self.placed({**kept, **self.others()}, passing)


def predict(spec: JobSpec, shape: ModelShape, ranks: int, tokens: int) -> Prediction:
    """The peak of each phase on one of `ranks` ranks, with micro-batches of `tokens` tokens. Raises InvalidJob for
    options that the model does not allow."""
    options = parse(spec.trainer.backend_options)
    check(options, {"num_attention_heads": shape.heads})
    policy = Fsdp2Memory(spec, options, shape, ranks, -(-tokens // options.sequence_parallel_size))
    at_rest = policy.state()
    at_rest.pop(Part.GRADIENTS, None)
    weights = dict(at_rest)
    weights.pop(Part.OPTIMIZER, None)
    staging = {Part.STAGING: sender_bytes(spec, shape)}
    return {
        Phase.LOAD: policy.placed({**weights, **policy.others()}, {}),
        Phase.SCORING: policy.scoring(),
        Phase.UPDATE: policy.update(),
        Phase.PUBLICATION: policy.placed({**at_rest, **policy.others()}, staging),
    }
