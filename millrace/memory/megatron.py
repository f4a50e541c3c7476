"""Memory of a rank of the megatron backend."""

from dataclasses import dataclass, replace

from millrace.backends.megatron import MegatronOptions, Recompute, parse
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.rules import check
from millrace.megatron.topology import Topology
from millrace.memory.head import head_bytes, scoring_bytes
from millrace.memory.layers import KeptElements, adapter_parameters, kept_elements, layer_parameters
from millrace.memory.ledger import Ledger, Part, Phase, Prediction, fullest
from millrace.memory.roles import role_tokens
from millrace.memory.staging import sender_bytes, snapshot_bytes
from millrace.spec import JobSpec
from millrace.spec.trainer import ROLES

FLOAT32 = 4
HOST_COPIES = 2 * FLOAT32
"""Bytes that an update in host memory needs for a parameter in addition to the optimizer: its gradient and its weight.
Measured: 19.4 in all (BENCHMARKS.md, "The megatron backend on GPUs", optimizer offload 1)."""
DIVIDED = 4
"""Bytes more for each parameter whose optimizer is on the device, where that of others is in host memory: measured
once, with half of the parameters each."""


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

    def state(self, shape: ModelShape) -> tuple[dict[Part, float], dict[Part, float]]:
        """What is kept for one trained model, on the device and in host memory: weights in the dtype of the pass,
        float32 gradients, and the optimizer, divided over the data-parallel ranks."""
        o, topology = self.options, self.topology
        dense, experts = self.counts(shape)
        moment = 2 if o.optimizer_moments == "bfloat16" else FLOAT32
        each = (FLOAT32 if self.element == 2 else 0) + 2 * moment
        copies = topology.data_parallel * o.context_parallel
        shares = (copies, topology.expert_data_parallel) if o.distributed_optimizer else (1, 1)
        if (lora := self.spec.model.lora) is not None and not shape.value_head:
            adapter = adapter_parameters(shape, lora) * len(self.layers) / shape.layers / o.tensor_parallel
            size = (self.element + FLOAT32 + each / shares[0]) * adapter
            return {Part.WEIGHTS: self.element * (dense + experts), Part.ADAPTER: size}, {}
        trained = dense / shares[0] + experts / shares[1]
        on_host = o.optimizer_offload_fraction
        on_device = each + (DIVIDED if 0 < on_host < 1 else 0)
        device = {
            Part.WEIGHTS: self.element * (dense + experts),
            Part.GRADIENTS: FLOAT32 * (dense + experts),
            Part.OPTIMIZER: on_device * (1 - on_host) * trained,
        }
        return device, {Part.OPTIMIZER: (each + HOST_COPIES) * on_host * trained}

    def ledger(
        self, passing: dict[Part, float], *, resting: bool = False, scoring: bool = False, idle: bool = False
    ) -> Ledger:
        """The ledger of a moment. `resting`: between updates, when the job may have optimizer and gradients in host
        memory. `scoring`: the reference is on the device even where it is offloaded between uses. `idle`: neither a
        pass nor a publication needs the weights. Host memory for weights is kept while they are on the device."""
        device, host = self.state(self.shape)
        if self.options.offload_parameters:
            host[Part.WEIGHTS] = device[Part.WEIGHTS]
            device[Part.WEIGHTS] *= not idle
        dense, experts = self.counts(self.shape)
        if self.spec.algorithm.kl is not None and self.spec.model.lora is None:
            own = parse(self.spec.trainer.of("reference").backend_options)
            place = host if own.offload_reference and not scoring else device
            place[Part.REFERENCE] = self.element * (dense + experts)
        if self.spec.algorithm.critic is not None:
            of_critic, on_host = self.state(self.shape.as_critic())
            device[Part.CRITIC] = sum(of_critic.values())
            host[Part.CRITIC] = sum(on_host.values())
        if resting and self.options.offload_optimizer:
            host[Part.OPTIMIZER] = host.get(Part.OPTIMIZER, 0.0) + device.pop(Part.OPTIMIZER, 0.0)
        if resting and self.options.frees_gradients:
            device.pop(Part.GRADIENTS, None)
        return Ledger({**device, **passing}, host)

    def layer_elements(self, kept: KeptElements) -> dict[str, float]:
        """Elements of one token on this rank, by the part of a layer. Tensor parallelism divides residuals and norms
        only where it divides the sequence."""
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
        total = again = 0.0
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

    def update(self) -> Ledger:
        """The peak of forward and backward: of the head's backward pass, or of a layer that is computed again."""
        kept, again = self.activations()
        moments = [self.ledger({Part.ACTIVATIONS: kept + again})]
        if self.has_head:
            frozen = self.spec.model.lora is not None
            logits = head_bytes(self.rows, self.shape.hidden, self.chunk, self.element, frozen=frozen)
            moments.append(self.ledger({Part.ACTIVATIONS: kept, Part.LOGITS: logits}))
        return fullest(moments)

    def moments(self) -> list[Ledger]:
        """The peaks of the updates of policy and critic, which come one after the other."""
        found = [self.update()]
        if self.spec.algorithm.critic is not None:
            tokens = role_tokens(self.spec.trainer, "critic", self.tokens)
            kept, again = replace(self, tokens=tokens).activations()
            found.append(self.ledger({Part.ACTIVATIONS: kept + again}))
        return found

    def scoring(self) -> Ledger:
        """The peak of the forward passes of all models, with one layer's activations at a time."""
        algorithm, trainer = self.spec.algorithm, self.spec.trainer
        used = {"reference": algorithm.kl is not None, "critic": algorithm.critic is not None}
        tokens = [self.tokens, *(role_tokens(trainer, role, self.tokens) for role in ROLES if used[role])]
        return replace(self, tokens=max(tokens))._scoring()

    def _scoring(self) -> Ledger:
        """The peak of a forward pass."""
        tokens = self.element * self.tokens / self.options.context_parallel
        layers = [sum(self.layer_elements(kept_elements(self.shape, layer)).values()) for layer in self.layers]
        passing = {Part.ACTIVATIONS: tokens * max(layers)}
        if self.has_head:
            passing[Part.LOGITS] = scoring_bytes(self.rows, self.chunk, self.element)
        return self.ledger(passing, resting=True, scoring=True)


def _recompute(spec: JobSpec, options: MegatronOptions) -> Recompute:
    """`trainer.activation_recompute` means full recomputation where the options do not say how."""
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
    check(options, shape, ranks, cuda=True)
    topology = Topology(ranks, options)
    stages = [StageMemory(spec, topology, shape, stage, tokens) for stage in range(options.pipeline_parallel)]
    staging = {Part.STAGING: sender_bytes(spec, shape)}
    return {
        Phase.LOAD: fullest([stage.ledger({}, resting=True, idle=True) for stage in stages]),
        Phase.SCORING: fullest([stage.scoring() for stage in stages]),
        Phase.UPDATE: fullest([moment for stage in stages for moment in stage.moments()]),
        Phase.PUBLICATION: fullest([stage.ledger(staging, resting=True) for stage in stages]).with_host(
            {Part.STAGING: snapshot_bytes(spec, shape, ranks)}
        ),
    }
