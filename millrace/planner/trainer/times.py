"""Seconds of a step in the trainer: forward passes before the updates, the updates, and what is moved for them."""

import math
from dataclasses import dataclass, replace

from millrace.megatron.architectures.shape import ModelShape, sequence_cost
from millrace.memory.adapters import active_adapter_parameters, adapter_parameters
from millrace.memory.layers import (
    kept_elements,
    layer_parameters,
    parameters,
    vocabulary_parameters,
)
from millrace.planner import constants
from millrace.planner.hardware import GIGA, Gpu, Links
from millrace.planner.trainer.layers import ELEMENT, LayerTimes, MicroBatch
from millrace.planner.trainer.layout import PLANNED, Cause, Imbalance, Layout, Seconds, added, scaled, total
from millrace.planner.workload import Workload
from millrace.sequence_cost import PASSES
from millrace.spec.lora import Lora

FLOAT32 = 4
STATE = 3 * FLOAT32
"""Bytes of optimizer state for a parameter: float32 weight and two moments."""


@dataclass(frozen=True)
class TrainingTimes:
    """Seconds of one step."""

    scoring: Seconds
    """Forward passes of policy, reference and critic before the updates."""
    update: Seconds
    """All updates of the step, the critic's too."""
    policy_s: float
    """Seconds of them that are the policy's."""
    flops: float
    """Model FLOPs of the updates, the policy's alone."""
    gpus: int
    peak: float
    """Published FLOP/s of a GPU."""

    @property
    def mfu(self) -> float:
        """Model FLOPs of the policy's updates over what all GPUs could have computed meanwhile: `perf/mfu/actor`."""
        return self.flops / self.policy_s / self.gpus / self.peak

    @property
    def total(self) -> float:
        return total(self.scoring) + total(self.update)


@dataclass(frozen=True)
class Trainer:
    """One model in the trainer."""

    gpu: Gpu
    shape: ModelShape
    layout: Layout
    work: Workload
    token_budget: int
    lora: Lora | None = None
    imbalance: Imbalance = PLANNED
    trains_tower: bool = False
    """Whether the tower for images is trained with the model, and sharded with it."""

    @property
    def _parameters(self) -> float:
        return parameters(self.shape, with_tower=self.trains_tower)

    @property
    def links(self) -> Links:
        return Links(self.gpu)

    def micro_batches(self, tokens: float) -> tuple[int, LayerTimes]:
        """Micro-batches of a data-parallel rank for this many tokens of the whole step, and the times of one."""
        each = tokens / self.layout.data
        count = max(1, math.ceil(each / self.token_budget - 1e-9))
        batch = MicroBatch(each / count, self.work.mean_pair_length)
        return count, LayerTimes(self.gpu, self.shape, self.layout, batch, self.imbalance, self.lora is not None)

    def scoring(self) -> dict[Cause, float]:
        """One forward pass over all tokens of the step."""
        count, times = self.micro_batches(self.work.tokens)
        stages = [added([self._stage(times, stage, backward=False)]) for stage in range(self.layout.pipeline)]
        passes = added([self._pipelined(stages, count), self._gathers(count, passes=1)])
        return self._packed(passes)

    def update(self) -> dict[Cause, float]:
        """All updates of the step."""
        updates = self.work.passes.updates
        count, times = self.micro_batches(self.work.tokens / updates)
        stages = []
        for stage in range(self.layout.pipeline):
            both = [self._stage(times, stage, backward=backward) for backward in (False, True)]
            stages.append(added([*both, self._moved_activations(times, stage, total(added(both)))]))
        passes = added([self._pipelined(stages, count), self._gathers(count, passes=2)])
        each = added([self._packed(passes), self._gradients(), self._optimizer()])
        return added([scaled(each, updates), self._moved_weights()])

    def images(self) -> float:
        """FLOPs of the tower's forward pass for the images of a step on one rank. Answers to a prompt go to any rank,
        and ranks that share a micro-batch each see all of its images; of pipeline stages only the first one does.
        Features from a frozen tower are kept for the step; a trained one computes the images of each micro-batch."""
        if self.shape.tower is None:
            return 0.0
        count = self.micro_batches(self.work.tokens)[0] if self.trains_tower else 1
        seen = count * self.work.prompts * (1 - (1 - 1 / self.layout.data / count) ** self.work.samples)
        return seen * self.shape.tower.flops_of_tokens(self.work.image_tokens) if self.work.image_tokens else 0.0

    def seeing(self, passes: float = 1.0) -> dict[Cause, float]:
        """Seconds of so many forward passes of the tower."""
        flops = passes * self.images()
        return {Cause.TOWER: flops / (constants.LAYER_SHARE * self.gpu.product_rate)} if flops else {}

    def _packed(self, passes: Seconds) -> dict[Cause, float]:
        waste = self.imbalance.packing(self.layout.data) if self.layout.lockstep else 0.0
        return added([passes, {Cause.PACKING: waste * total(passes)}])

    def _layers(self, stage: int) -> range:
        first = sum(self.layout.stages[:stage])
        return range(first, first + self.layout.stages[stage])

    def _stage(self, times: LayerTimes, stage: int, *, backward: bool) -> dict[Cause, float]:
        """One micro-batch on one stage."""
        run = times.backward if backward else times.forward
        kinds = [self.shape.has_experts(layer) for layer in self._layers(stage)]
        parts: list[Seconds] = []
        for kind in set(kinds):
            layer = self._layers(stage)[kinds.index(kind)]
            parts.append(scaled(run(layer), kinds.count(kind)))
        if stage == self.layout.pipeline - 1:
            parts.append(times.head(backward=backward))
        return added(parts)

    def _pipelined(self, stages: list[dict[Cause, float]], count: int) -> dict[Cause, float]:
        """`count` micro-batches through all stages: the slowest stage works all the time, and waits once for the others
        to fill and to empty. With v chunks a stage the wait is 1/v of that."""
        if len(stages) == 1:
            return scaled(stages[0], count)
        slowest = max(stages, key=total)
        mean = scaled(added(stages), count / len(stages))
        fill = (sum(map(total, stages)) - total(slowest)) / self.layout.virtual
        waiting = count * total(slowest) + fill - total(mean)
        return added([mean, {Cause.PIPELINE: waiting}])

    def _gathers(self, count: int, *, passes: int) -> dict[Cause, float]:
        """FSDP2 gathers each layer's weights in each pass while the layer before it computes; if they are in host
        memory they come over its link."""
        o = self.layout
        size = ELEMENT * self._parameters
        found = {}
        if (o.moved_weights and o.shards > 1) or (o.backend == "fsdp2" and o.moved_weights):
            found[Cause.OFFLOAD] = count * passes * FLOAT32 / ELEMENT * size / o.shards / self.links.to_host
        if o.shards > 1:
            gathered = self.links.gathered(size, o.shards)
            computing = total(self._stage(self.micro_batches(self.work.tokens)[1], 0, backward=False))
            found[Cause.DATA] = count * passes * max(0.0, gathered - computing)
        return found

    def _share(self) -> tuple[float, float]:
        """Parameters of the fullest rank: without routed experts, and of them."""
        o, shape = self.layout, self.shape
        dense, experts = [], []
        for stage in range(o.pipeline):
            sizes = [layer_parameters(shape, layer) for layer in self._layers(stage)]
            ends = vocabulary_parameters(shape) / (1 if o.pipeline == 1 else 2) if stage in (0, o.pipeline - 1) else 0
            dense.append((sum(size.dense for size in sizes) + ends) / o.tensor)
            experts.append(sum(size.experts for size in sizes) / (o.expert * o.expert_tensor))
        return max(dense), max(experts)

    def _gradients(self) -> dict[Cause, float]:
        """Gradients in float32 are added over the ranks that hold the same weights, and the new weights gathered."""
        o = self.layout
        if self.lora is not None:
            return {}
        if o.backend == "fsdp2":
            size = FLOAT32 * self._parameters
            copies = o.gpus // o.shards
            return {
                Cause.DATA: self.links.gathered(size, o.shards)
                + 2 * self.links.gathered(size / o.shards, copies, stride=o.shards)
            }
        dense, experts = self._share()
        each = FLOAT32 + ELEMENT
        return {
            Cause.DATA: self.links.gathered(each * dense, o.data * o.context, stride=o.tensor)
            + self.links.gathered(each * experts, o.expert_data, stride=o.expert * o.expert_tensor)
        }

    def _optimized(self) -> float:
        """Parameters whose optimizer the fullest rank has."""
        o = self.layout
        if self.lora is not None:
            return adapter_parameters(self.shape, self.lora) / (o.shards if o.shards > 1 else o.gpus)
        if o.backend == "fsdp2":
            return self._parameters / o.shards
        dense, experts = self._share()
        return dense / (o.data * o.context) + experts / o.expert_data

    def _optimizer(self) -> dict[Cause, float]:
        """The update of the weights, on the GPU or in host memory, and the travels of what is elsewhere between
        updates."""
        o, count = self.layout, self._optimized()
        on_host = o.offloaded_optimizer * count
        there = (count - on_host) * constants.OPTIMIZER_BYTES / (constants.MEMORY_SHARE * self.gpu.memory_rate)
        ranks = min(o.gpus, self.gpu.gpus_per_host)
        rate = min(
            constants.HOST_UPDATE_BYTES_S,
            constants.HOST_MEMORY_SHARE * self.gpu.host_memory_gb_s * GIGA / ranks,
        )
        moved = on_host * constants.HOST_TRAFFIC_BYTES
        if o.moved_optimizer:
            moved += 2 * STATE * (count - on_host)
        return {
            Cause.OPTIMIZER: there + on_host * constants.HOST_UPDATE_BYTES / rate,
            Cause.OFFLOAD: moved / self.links.to_host,
        }

    def _moved_weights(self) -> dict[Cause, float]:
        """Megatron's weights come from host memory once a step, and go back."""
        if not self.layout.moved_weights or self.layout.backend == "fsdp2":
            return {}
        return {Cause.OFFLOAD: 2 * ELEMENT * sum(self._share()) / self.links.to_host}

    def _moved_activations(self, times: LayerTimes, stage: int, computing: float) -> dict[Cause, float]:
        """Activations go to host memory during the forward pass and come back during the backward pass: the link or
        the computation takes longer, in each."""
        if not self.layout.moved_activations:
            return {}
        per_token = sum(
            self.shape.hidden if self.layout.recomputed.everything else kept_elements(self.shape, layer).total
            for layer in self._layers(stage)
        )
        link = ELEMENT * per_token * times.tokens / self.links.to_host
        return {Cause.OFFLOAD: max(0.0, link - computing / 3) + max(0.0, link - computing * 2 / 3)}


def training_times(trainer: Trainer) -> TrainingTimes:
    """The seconds of a step, with those of a critic if the job has one."""
    passes = trainer.work.passes
    looks = passes.policy + passes.reference
    # Of a frozen tower the first pass over an image has its features kept for all others.
    seen, trained = (looks, PASSES) if trainer.trains_tower else (min(looks, 1), 0.0 if looks else 1.0)
    scoring = added([scaled(trainer.scoring(), looks), trainer.seeing(seen)])
    update, images = added([trainer.update(), trainer.seeing(trained)]), trained * trainer.images()
    policy = update
    if passes.values:
        critic = replace(trainer, shape=trainer.shape.as_critic(), lora=None)
        scoring, update = added([scoring, critic.scoring()]), added([update, critic.update()])
    adapters = 0 if trainer.lora is None else int(active_adapter_parameters(trainer.shape, trainer.lora))
    flops = trainer.work.flops(sequence_cost(trainer.shape, adapters)) + images * (
        trainer.layout.gpus // trainer.layout.pipeline
    )
    return TrainingTimes(scoring, update, total(policy), flops, trainer.layout.gpus, trainer.gpu.bf16_tflops * 1e12)
