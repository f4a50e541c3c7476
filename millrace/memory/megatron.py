"""Memory of a rank of the megatron backend."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from millrace.backends.megatron import MegatronOptions, Recompute, parse
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.rules import check
from millrace.megatron.topology import Topology
from millrace.memory.adapters import adapter_layers
from millrace.memory.layers import (
    KeptElements,
    head_bytes,
    kept_elements,
    layer_parameters,
    role_tokens,
    scoring_bytes,
    seeing_bytes,
)
from millrace.memory.ledger import Ledger, Part, Phase, Prediction, fullest
from millrace.memory.staging import sender_bytes, snapshot_bytes
from millrace.spec import JobSpec
from millrace.towers import MOST_KEPT, TowerShape

FLOAT32 = 4
HOST_COPIES = 2 * FLOAT32
"""Bytes that an update in host memory needs for a parameter in addition to the optimizer: its gradient and its weight.
Measured: 19.4 in all (BENCHMARKS.md, "The megatron backend on GPUs", optimizer offload 1)."""
DIVIDED = 4
"""Bytes more for each parameter whose optimizer is on the device, if that of others is in host memory: measured
once, with half of the parameters each."""


class Use(Enum):
    """What a trained model is used for at a moment. What the job offloads is in host memory otherwise."""

    NONE = auto()
    READ = auto()
    """A forward pass, or a publication: the weights are on the device."""
    TRAINED = auto()
    """From a backward pass to its update: gradients and optimizer are there too."""


@dataclass(frozen=True)
class StageMemory:
    """One pipeline stage of one model on one rank. Sizes are bytes, `tokens` those of a micro-batch."""

    spec: JobSpec
    topology: Topology
    shape: ModelShape
    stage: int
    tokens: int

    @property
    def options(self) -> MegatronOptions:
        return self.topology.options

    @property
    def element(self) -> int:
        """Bytes of an element in forward and backward passes."""
        return 2 if self.spec.trainer.dtype == "bfloat16" else FLOAT32

    @property
    def layers(self) -> list[int]:
        """Numbers of the stage's layers."""
        chunks = range(self.options.virtual_pipeline)
        return [n for chunk in chunks for n in self.topology.layers_of(self.stage, chunk, self.shape.layers)]

    @property
    def has_head(self) -> bool:
        return self.stage == self.options.pipeline_parallel - 1

    def counts(self, shape: ModelShape) -> tuple[float, float]:
        """Parameters on this rank: without the routed experts, and of them."""
        o = self.options
        layers = [layer_parameters(shape, layer) for layer in self.layers]
        dense = sum(layer.dense for layer in layers) / o.tensor_parallel
        experts = sum(layer.experts for layer in layers) / (o.expert_parallel * o.expert_tensor_size)
        rows = shape.padded_vocabulary(o.tensor_parallel) / o.tensor_parallel
        if self.stage == 0:
            dense += rows * shape.hidden
        if self.has_head and not (shape.tied and self.stage == 0):
            dense += shape.hidden * (1 if shape.value_head else rows)
        return dense, experts

    @property
    def adapted(self) -> bool:
        return self.spec.model.lora is not None

    def trained(self) -> tuple[float, float]:
        """Parameters on this rank that are trained, and those of them whose optimizer this rank keeps."""
        o, lora = self.options, self.spec.model.lora
        dense, experts = self.counts(self.shape)
        if lora is not None:
            adapted = adapter_layers(self.shape, lora, ranks=o.tensor_parallel, expert_ranks=o.expert_tensor_size)
            dense = sum(adapted[layer].dense for layer in self.layers)
            experts = sum(adapted[layer].experts for layer in self.layers) / o.expert_parallel
        copies = self.topology.data_parallel * o.context_parallel
        shares = (copies, self.topology.expert_data_parallel) if o.distributed_optimizer else (1, 1)
        return dense + experts, dense / shares[0] + experts / shares[1]

    def kept(self, use: Use) -> Ledger:
        """What is kept for this model: weights in the dtype of the pass, float32 gradients, and the optimizer, divided
        over the data-parallel ranks. Host memory for weights is kept while they are on the device."""
        o = self.options
        trained, owned = self.trained()
        weights = Ledger({Part.WEIGHTS: self.element * sum(self.counts(self.shape))})
        state = Ledger({Part.GRADIENTS: FLOAT32 * trained if use is Use.TRAINED or not o.frees_gradients else 0.0})
        state += self._optimizer(owned, resting=use is not Use.TRAINED)
        if self.adapted:
            weights += Ledger({Part.ADAPTER: self.element * trained})
            state = state.under(Part.ADAPTER)
        if not o.offload_parameters:
            return weights + state
        on_host = Ledger({}, weights.device)
        return state + on_host if use is Use.NONE else weights + state + on_host

    def _optimizer(self, owned: float, *, resting: bool) -> Ledger:
        """Memory of the optimizer of this number of parameters. `resting`: between updates, when the job may have all
        of it in host memory."""
        o = self.options
        moment = 2 if o.optimizer_moments == "bfloat16" else FLOAT32
        each = (FLOAT32 if self.element == 2 else 0) + 2 * moment
        share = o.optimizer_offload_fraction
        on_device = (each + (DIVIDED if 0 < share < 1 else 0)) * (1 - share) * owned
        on_host = (each + HOST_COPIES) * share * owned
        if resting and o.offload_optimizer:
            return Ledger({}, {Part.OPTIMIZER: on_host + on_device})
        return Ledger({Part.OPTIMIZER: on_device}, {Part.OPTIMIZER: on_host})

    def critic(self) -> "StageMemory | None":
        """The critic's stage on this rank, with its own options and token budget; None if the job has none."""
        if self.spec.algorithm.critic is None:
            return None
        own = self.spec.trainer.of("critic")
        model = self.spec.model.model_copy(update={"lora": None})
        spec = self.spec.model_copy(update={"trainer": own, "model": model})
        topology = replace(self.topology, options=parse(own.backend_options))
        tokens = role_tokens(self.spec.trainer, "critic", self.tokens)
        return StageMemory(spec, topology, self.shape.as_critic(), self.stage, tokens)

    def reference(self) -> "StageMemory":
        """The stage as the reference runs it: with its own options, if it is not the policy, and token budget."""
        tokens = role_tokens(self.spec.trainer, "reference", self.tokens)
        if self.adapted:
            return replace(self, tokens=tokens)
        own = parse(self.spec.trainer.of("reference").backend_options)
        return replace(self, topology=replace(self.topology, options=own), tokens=tokens)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference beside the policy: with an adapter it is the policy."""
        return self.spec.algorithm.kl is not None and not self.adapted

    @property
    def tower(self) -> TowerShape | None:
        """The tower of a job with images, on ranks of the first stage: frozen, in the dtype of passes, and whole."""
        return None if self.spec.data.images is None or self.stage else self.shape.tower

    def features(self) -> Ledger:
        """What the tower made of images, which is kept up to a limit."""
        return Ledger({} if self.tower is None else {Part.ACTIVATIONS: float(MOST_KEPT)})

    def seeing(self, *, backward: bool) -> Ledger:
        """What the tower's forward pass takes for the largest image that a prompt may have, one image at a time.
        `backward`: with the activations of the micro-batches that other stages have meanwhile."""
        if self.tower is None:
            return Ledger({})
        others = self.activations()[0] * (1 - 1 / self.options.pipeline_parallel) if backward else 0.0
        return Ledger({Part.ACTIVATIONS: others + seeing_bytes(self.spec, self.tower, self.element)})

    @property
    def added(self) -> float:
        """Elements of one token on this rank of what the tower gives to the embedding and the first layers: any token
        may be one of an image. A tower that gives nothing to layers leaves nothing after the embedding."""
        layers, o = self.shape.deepstack_layers, self.options
        if self.tower is None or not layers:
            return 0.0
        return (1 + layers) * self.shape.hidden / (o.tensor_parallel if o.splits_sequence else 1)

    def all_models(self, policy: Use, critic: Use, *, reference: bool = False) -> Ledger:
        """What is kept for all models while they are used for that; `reference`: whether the reference is used."""
        found = self.kept(policy)
        if self.tower is not None:
            found += Ledger({Part.WEIGHTS: self.element * self.tower.parameters})
        if self.has_reference:
            weights = {Part.REFERENCE: self.element * sum(self.counts(self.shape))}
            rests = self.reference().options.offload_reference and not reference
            found += Ledger({}, weights) if rests else Ledger(weights)
        if (model := self.critic()) is not None:
            found += model.kept(critic).under(Part.CRITIC)
        return found

    def layer_elements(self, kept: KeptElements) -> dict[str, float]:
        """Elements of one token on this rank, by the part of a layer. Tensor parallelism divides residuals and norms
        only if it divides the sequence."""
        o = self.options
        tensor = o.tensor_parallel
        gathered = o.expert_tensor_size / tensor
        residual = kept.residual / (tensor if o.splits_sequence else 1)
        return {
            "residual": residual / 2,
            "layernorm": residual / 2,
            "core_attn": kept.attention / tensor,
            "mlp": kept.ffn / tensor,
            "moe": kept.sent * gathered,
            "moe_act": kept.experts / 3 / tensor,
            "experts": kept.experts * 2 / 3 / tensor,
        }

    def activations(self) -> tuple[float, float]:
        """Bytes of all layers, and of one layer while it is computed again (0 without recomputation)."""
        o, recompute = self.options, _recompute(self.spec, self.options)
        tokens = self.element * self.tokens / o.context_parallel
        # Layers that are computed again add these features again.
        total, again = self.added if recompute.granularity == "full" else 0.0, 0.0
        for number, layer in enumerate(self.layers):
            elements = self.layer_elements(kept_elements(self.shape, layer))
            whole, kept = sum(elements.values()), _remaining(elements, recompute, number, self.shape)
            again = max(again, whole - kept)
            total += kept
        in_flight = 1.0 * o.pipeline_parallel - self.stage
        if o.virtual_pipeline > 1:
            in_flight *= 1 + (o.pipeline_parallel - 1) / (o.pipeline_parallel * o.virtual_pipeline)
        units = recompute.layers if recompute.granularity == "full" and recompute.method == "uniform" else 1
        return tokens * total * in_flight, tokens * again * units

    @property
    def rows(self) -> float:
        """Rows of the head's weight on this rank."""
        return self.shape.padded_vocabulary(self.options.tensor_parallel) / self.options.tensor_parallel

    @property
    def chunk(self) -> float:
        return min(self.options.logprob_chunk_tokens, self.tokens / self.options.context_parallel)

    def backward(self) -> Iterator[Ledger]:
        """The moments of a forward and a backward pass that take most: a layer that is computed again, and the head's
        backward pass."""
        kept, again = self.activations()
        yield Ledger({Part.ACTIVATIONS: kept + again})
        if self.has_head and not self.shape.value_head:
            logits = head_bytes(self.rows, self.shape.hidden, self.chunk, self.element, frozen=self.adapted)
            yield Ledger({Part.ACTIVATIONS: kept, Part.LOGITS: logits})

    def forward(self) -> Ledger:
        """The peak of a forward pass, with one layer's activations at a time."""
        tokens = self.element * self.tokens / self.options.context_parallel
        layers = [sum(self.layer_elements(kept_elements(self.shape, layer)).values()) for layer in self.layers]
        passing = {Part.ACTIVATIONS: tokens * (max(layers) + self.added)}
        if self.has_head and not self.shape.value_head:
            passing[Part.LOGITS] = scoring_bytes(self.rows, self.chunk, self.element)
        return Ledger(passing)

    @property
    def policy_between(self) -> Use:
        """The policy's use while the critic computes: the reference's pass leaves the policy's weights on the
        device."""
        return Use.READ if self.has_reference else Use.NONE

    def update(self) -> Iterator[Ledger]:
        """The moments of both updates that take most, the critic's before the policy's. The critic's gradients are kept
        until both are known to be finite."""
        kept = self.all_models(Use.TRAINED, Use.TRAINED) + self.features()
        yield from (kept + passing for passing in (*self.backward(), self.seeing(backward=True)))
        if (critic := self.critic()) is not None:
            kept = self.all_models(self.policy_between, Use.TRAINED)
            yield from (kept + passing for passing in critic.backward())

    def scoring(self) -> Iterator[Ledger]:
        """The peaks of the forward passes of all models."""
        kept = self.all_models(Use.READ, Use.NONE) + self.features()
        yield from (kept + passing for passing in (self.forward(), self.seeing(backward=False)))
        if self.spec.algorithm.kl is not None:
            kept = self.all_models(Use.READ, Use.NONE, reference=True) + self.features()
            yield from (kept + passing for passing in (self.reference().forward(), self.seeing(backward=False)))
        if (critic := self.critic()) is not None:
            yield self.all_models(self.policy_between, Use.READ) + critic.forward()


def _recompute(spec: JobSpec, options: MegatronOptions) -> Recompute:
    """`trainer.activation_recompute` means full recomputation if the options do not say how."""
    if spec.trainer.activation_recompute and options.recompute.granularity == "none":
        return Recompute(granularity="full")
    return options.recompute


def _remaining(elements: dict[str, float], recompute: Recompute, number: int, shape: ModelShape) -> float:
    """Elements of one token that the stage's layer `number` keeps. What flash attention computes again is not kept
    anyway: `core_attn` saves nothing."""
    total = sum(elements.values())
    if recompute.granularity == "full":
        if recompute.method == "block":
            return elements["residual"] / 2 if number < recompute.layers else total
        return elements["residual"] / 2 / recompute.layers
    if recompute.granularity == "none":
        return total
    names = set(recompute.modules)
    saved = {"moe_act": elements["moe_act"], "mlp": elements["mlp"], "layernorm": elements["layernorm"]}
    saved |= {"shared_experts": elements["mlp"] if shape.experts is not None else 0.0}
    saved |= {"moe": elements["moe"] + elements["experts"], "mla_up_proj": elements["core_attn"] / 2}
    if "moe" in names:
        names |= {"moe_act", "shared_experts"}
    if shape.latent is None:
        names -= {"mla_up_proj"}
    return total - sum(saved[name] for name in names & saved.keys())


def predict(spec: JobSpec, shape: ModelShape, ranks: int, tokens: int) -> Prediction:
    """The peak of each phase on the fullest of `ranks` ranks, with micro-batches of `tokens` tokens. Pipeline stages
    differ: the first one keeps the activations of most micro-batches, the last one has the head. Raises InvalidJob for
    options that the model or the number of ranks does not allow."""
    options = parse(spec.trainer.backend_options)
    check(options, shape, ranks, cuda=True, images=spec.data.images is not None)
    topology = Topology(ranks, options)
    stages = [StageMemory(spec, topology, shape, stage, tokens) for stage in range(options.pipeline_parallel)]
    staging = Ledger({Part.STAGING: sender_bytes(spec, shape)}, {Part.STAGING: snapshot_bytes(spec, shape, ranks)})
    return {
        Phase.LOAD: fullest([stage.all_models(Use.NONE, Use.NONE) for stage in stages]),
        Phase.SCORING: fullest([moment for stage in stages for moment in stage.scoring()]),
        Phase.UPDATE: fullest([moment for stage in stages for moment in stage.update()]),
        Phase.PUBLICATION: fullest([stage.all_models(Use.READ, Use.NONE) + stage.features() for stage in stages])
        + staging,
    }
