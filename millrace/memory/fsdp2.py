"""Memory of a rank of the fsdp2 backend."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from millrace.backends.fsdp2 import Fsdp2Options, parse
from millrace.fsdp2.architectures import keeps_whole_logits
from millrace.fsdp2.sequence_parallel import check
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.adapters import adapter_parameters, without_experts
from millrace.memory.layers import (
    head_bytes,
    kept_elements,
    layer_parameters,
    parameters,
    role_tokens,
    scoring_bytes,
    seeing_bytes,
    vocabulary_parameters,
)
from millrace.memory.ledger import Ledger, Part, Phase, Prediction, fullest
from millrace.memory.staging import sender_bytes, snapshot_bytes
from millrace.spec import JobSpec
from millrace.spec.trainer import ROLES, Role
from millrace.towers import MOST_KEPT, TowerShape

FLOAT32 = 4
MOMENTS = 2 * FLOAT32
PREFETCHED = 2
"""Layers that are whole at a time: the one that computes and the one that is gathered ahead."""

ON_DEVICE = 2
"""Layers whose activations are on the device with `offload_activations`."""


@dataclass(frozen=True)
class ModelPasses:
    """What the passes of one model take on one rank, in addition to what is kept between passes."""

    options: Fsdp2Options
    shape: ModelShape
    element: int
    """Bytes of an element in forward and backward passes."""
    shards: int
    """Ranks that share one copy of the model."""
    tokens: int
    """Tokens of a micro-batch on this rank."""
    recompute: bool
    adapted: bool
    """Whether only an adapter is trained."""
    whole_logits: bool
    """Whether the logits of all tokens exist at a time."""

    @classmethod
    def of(cls, spec: JobSpec, shape: ModelShape, ranks: int, tokens: int) -> Self:
        """The passes of a model that is run as `spec.trainer` says. `tokens` are those of a micro-batch on all ranks
        that share it. Raises InvalidJob for ranks that cannot share it."""
        trainer = spec.trainer
        options = parse(trainer.backend_options)
        check(options, {"num_attention_heads": shape.heads})
        return cls(
            options,
            shape,
            2 if trainer.dtype == "bfloat16" else FLOAT32,
            options.fsdp_size or ranks,
            -(-tokens // options.sequence_parallel_size),
            trainer.activation_recompute,
            spec.model.lora is not None and not shape.value_head,
            keeps_whole_logits(shape.architecture, spec.model.lora),
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

    def placed(self, kept: dict[Part, float], moments: dict[Part, float]) -> Ledger:
        """What is kept for the model and the moments of its optimizer, if the model's options have them."""
        if self.options.offload_parameters:
            return Ledger({}, kept) + Ledger({}, moments)
        return Ledger(kept) + (Ledger({}, moments) if self.options.offload_optimizer else Ledger(moments))

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        return self.tokens if self.whole_logits else min(self.options.logprob_chunk_tokens, self.tokens)

    def update(self) -> Iterator[Ledger]:
        """The moments of forward and backward that take most: the backward pass of the head, when all activations are
        kept; that of the last layer, when its gradients are divided over the ranks; and the end, when those of
        embedding and head are. Pinned host memory of offloaded activations stays with the process."""
        shape, layers = self.shape, self.layers()
        vocabulary = vocabulary_parameters(shape)
        root, whole = self.element * vocabulary, PREFETCHED * self.element * max(layers)
        kept, host = self.kept_activations(), {}
        one_layer = max(kept)
        if self.recompute:
            kept = [self.element * self.tokens * shape.hidden for _ in kept]
        if self.options.offload_activations:
            host = {Part.ACTIVATIONS: sum(kept[:-ON_DEVICE])}
            kept = kept[-ON_DEVICE:]
        sizes = shape.vocabulary, shape.hidden, self.chunk, self.element
        logits = 0.0 if shape.value_head else head_bytes(*sizes, frozen=self.adapted)
        head = {Part.GATHERED: root + whole / PREFETCHED, Part.ACTIVATIONS: sum(kept), Part.LOGITS: logits}
        yield Ledger(head, host)
        reduced = 0.0 if self.adapted else max(layers) * (self.element + FLOAT32 + FLOAT32 / self.shards)
        of_head = 0.0 if self.adapted else root / (1 if shape.tied else 2)
        activations = sum(kept) - kept[-1] + one_layer
        yield Ledger({Part.GATHERED: root + whole + reduced + of_head, Part.ACTIVATIONS: activations}, host)
        if not self.adapted:
            yield Ledger({Part.GATHERED: vocabulary * self._divided()}, host)

    def _divided(self) -> float:
        """Bytes for each parameter of a group while its gradients are divided over the ranks. With several ranks they
        are copied to float32 and summed into this rank's share; one rank copies them, divides them by 1 and copies them
        again."""
        if self.shards == 1:
            return 3 * FLOAT32
        return max(self.element + FLOAT32, FLOAT32 + FLOAT32 / self.shards)

    def scoring(self) -> Ledger:
        """The peak of a forward pass: one layer's activations at a time."""
        logits = 0.0 if self.shape.value_head else scoring_bytes(self.shape.vocabulary, self.chunk, self.element)
        return Ledger(
            {
                Part.GATHERED: self.element * (vocabulary_parameters(self.shape) + PREFETCHED * max(self.layers())),
                Part.ACTIVATIONS: max(self.kept_activations()),
                Part.LOGITS: logits,
            }
        )


@dataclass(frozen=True)
class Fsdp2Memory:
    """All models of a job on one rank. `tokens` are those of the policy's micro-batch, on all ranks that share it."""

    spec: JobSpec
    shape: ModelShape
    ranks: int
    tokens: int

    @property
    def policy(self) -> ModelPasses:
        return ModelPasses.of(self.spec, self.shape, self.ranks, self.tokens)

    def role(self, role: Role) -> ModelPasses | None:
        """The passes of reference or critic with its own options and token budget; None if the job has none. With
        an adapter the reference is the policy."""
        algorithm, trainer = self.spec.algorithm, self.spec.trainer.of(role)
        if (algorithm.kl if role == "reference" else algorithm.critic) is None:
            return None
        tokens = role_tokens(self.spec.trainer, role, self.tokens)
        if role == "reference" and self.adapted:
            trainer = self.spec.trainer
        shape = self.shape.as_critic() if role == "critic" else self.shape
        return ModelPasses.of(self.spec.model_copy(update={"trainer": trainer}), shape, self.ranks, tokens)

    @property
    def tower(self) -> TowerShape | None:
        """The tower for images; None if the job's prompts have none."""
        return None if self.spec.data.images is None else self.shape.tower

    @property
    def parameters(self) -> float:
        """Parameters of the model that is sharded: with the tower if it is trained."""
        return parameters(self.shape, with_tower=self.spec.trainer.train_tower)

    @property
    def adapted(self) -> bool:
        return self.spec.model.lora is not None

    def of_policy(self, *, gradients: bool = False, moments: bool = True) -> Ledger:
        """What is kept for the policy: float32 weights and moments, and from a backward pass to its update gradients,
        divided over the ranks. With an adapter the weights have the dtype of the pass, and only the adapter is
        trained."""
        passes, lora = self.policy, self.spec.model.lora
        count, trained = self.parameters / passes.shards, FLOAT32 * (1 + gradients)
        if lora is None:
            kept = {Part.WEIGHTS: FLOAT32 * count} | ({Part.GRADIENTS: FLOAT32 * count} if gradients else {})
            placed = passes.placed(kept, {Part.OPTIMIZER: MOMENTS * count} if moments else {})
            return placed + self.of_tower(features=moments)
        adapter = adapter_parameters(self.shape, without_experts(lora)) / passes.shards
        kept = {Part.WEIGHTS: passes.element * count, Part.ADAPTER: trained * adapter}
        return passes.placed(kept, {Part.ADAPTER: MOMENTS * adapter} if moments else {}) + self.of_tower(
            features=moments
        )

    def of_tower(self, *, features: bool) -> Ledger:
        """The tower of a job with images: frozen, in the dtype of passes, and whole on every rank; a trained one is
        among the model's parameters. `features`: with what is kept of images, up to a limit."""
        if self.tower is None:
            return Ledger({})
        kept = {Part.ACTIVATIONS: float(MOST_KEPT)} if features else {}
        weights = 0 if self.spec.trainer.train_tower else self.policy.element * self.tower.parameters
        return Ledger(({Part.WEIGHTS: float(weights)} if weights else {}) | kept)

    def seeing(self) -> Ledger:
        """What the tower's forward pass takes. It runs before the layers of the model: if frozen for one image at a
        time, of which this is the largest that a prompt may have; if trained for all of a micro-batch."""
        if self.tower is None:
            return Ledger({})
        if not self.spec.trainer.train_tower:
            return Ledger({Part.ACTIVATIONS: seeing_bytes(self.spec, self.tower, self.policy.element)})
        patches = self._patches(self.tower)
        return Ledger({Part.ACTIVATIONS: self.tower.working_bytes(patches, self.policy.element)})

    def _patches(self, tower: TowerShape) -> int:
        """Patches of the images of a micro-batch whose sequences have the longest prompts and responses: as many as
        their prompts may have, each of another prompt."""
        data, images = self.spec.data, self.spec.data.images
        assert images is not None
        longest = data.max_prompt_tokens + self.spec.rollout.max_response_tokens
        each = min(images.max_per_prompt * tower.most_patches, data.max_prompt_tokens * tower.merge**2)
        return max(1, self.tokens // longest) * each

    def seen(self) -> Ledger:
        """What a trained tower keeps for its backward pass, which comes last."""
        if self.tower is None or not self.spec.trainer.train_tower:
            return Ledger({})
        recompute, element = self.spec.trainer.activation_recompute, self.policy.element
        kept = self.tower.kept_bytes(self._patches(self.tower), element, recompute=recompute)
        return Ledger({Part.ACTIVATIONS: kept})

    def of_others(self, *, gradients: bool = False, moments: bool = True) -> Ledger:
        """What is kept for reference and critic. `gradients`: those of the critic, from its backward pass to its
        update."""
        found = Ledger({})
        if (reference := self.role("reference")) is not None and not self.adapted:
            size = reference.element * self.parameters / reference.shards
            found += reference.placed({Part.REFERENCE: size}, {})
        if (critic := self.role("critic")) is not None:
            count = parameters(critic.shape) / critic.shards
            kept = {Part.CRITIC: FLOAT32 * (1 + gradients) * count}
            found += critic.placed(kept, {Part.CRITIC: MOMENTS * count} if moments else {})
        return found

    def loaded(self) -> Ledger:
        """What is kept before the first update."""
        return self.of_policy(moments=False) + self.of_others(moments=False)

    def at_rest(self) -> Ledger:
        """What is kept between updates."""
        return self.of_policy() + self.of_others()

    def update(self) -> Ledger:
        """The peak of both backward passes, the critic's before the policy's. The critic's gradients are kept until
        both are known to be finite."""
        others = self.of_others(gradients=True)
        moments = [self.of_policy(gradients=True) + others + passing + self.seen() for passing in self.policy.update()]
        if (critic := self.role("critic")) is not None:
            moments += [self.of_policy() + others + passing for passing in critic.update()]
        moments.append(self.of_policy(gradients=True) + others + self.seeing())
        return fullest(moments)

    def scoring(self) -> Ledger:
        """The peak of the forward passes of all models."""
        models = (self.policy, *(self.role(role) for role in ROLES))
        passes = [*(model.scoring() for model in models if model is not None), self.seeing()]
        return fullest([self.at_rest() + passing for passing in passes])


def predict(spec: JobSpec, shape: ModelShape, ranks: int, tokens: int) -> Prediction:
    """The peak of each phase on one of `ranks` ranks, with micro-batches of `tokens` tokens. Reference and critic have
    micro-batches that are larger or smaller in proportion to their token budgets. Raises InvalidJob for options that
    the model does not allow."""
    job = Fsdp2Memory(spec, shape, ranks, tokens)
    staging = Ledger({Part.STAGING: sender_bytes(spec, shape)}, {Part.STAGING: snapshot_bytes(spec, shape, ranks)})
    return {
        Phase.LOAD: job.loaded(),
        Phase.SCORING: job.scoring(),
        Phase.UPDATE: job.update(),
        Phase.PUBLICATION: job.at_rest() + staging,
    }
