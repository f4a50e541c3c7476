"""One replica: what a step of its engine takes, and how many tokens and requests it holds."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from millrace.engines import ENGINES
from millrace.errors import refused
from millrace.megatron.architectures.shape import ModelShape, active_parameters
from millrace.memory.layers import layer_parameters, vocabulary_parameters
from millrace.memory.prediction import ReplicaPrediction, cache_bytes_per_token, predict_replica
from millrace.memory.text import HEADROOM
from millrace.planner import constants
from millrace.planner.hardware import Gpu, Links
from millrace.spec import JobSpec

SLOTS = 1024
"""Requests that an engine runs at a time if the job does not say: vLLM's default on GPUs of 70 GiB and more."""
SLOT_OPTIONS = ("max_num_seqs", "max_running_requests")
EAGER_OPTIONS = ("enforce_eager", "disable_cuda_graph")
PIPELINE_OPTIONS = ("pipeline_parallel_size", "pp_size")
ELEMENT = 2


@dataclass(frozen=True)
class Replica:
    """An engine on `workers` GPUs."""

    gpu: Gpu
    shape: ModelShape
    workers: int
    stages: int
    """Pipeline stages among the workers."""
    slots: int
    cached_tokens: int
    cache_bytes: float
    """Bytes of the keys and values of one token on one worker."""
    state_tokens: float
    """Tokens that would take as much of the cache as the states of a request in recurrent layers. A token reads them
    as it reads keys and values."""
    eager: bool
    """Whether the engine starts every operation by itself instead of whole CUDA graphs."""
    memory: ReplicaPrediction

    @property
    def tensor(self) -> int:
        return self.workers // self.stages

    @property
    def fits(self) -> bool:
        """Whether a GPU holds its share, with room for at least one token's keys and values."""
        return self.memory.ledger.total <= self.gpu.memory and self.cached_tokens > 0

    @cached_property
    def _active(self) -> int:
        return active_parameters(self.shape)

    def decode(self, running: float, context: float) -> float:
        """Seconds of a step that gives each of `running` requests one token. `context`: tokens of all of them together.

        Weights, keys and values are read from memory, or products are computed: whichever takes longer. With pipeline
        stages the requests are divided over them, and a token passes all of them.
        """
        batch = max(1.0, running / self.stages)
        reading = (self._weights_read(batch) + self.cache_bytes * context) / constants.DECODE_SHARE
        computing = 2 * self._active * batch * self.stages / self.workers
        device = max(
            reading / self.gpu.memory_rate, computing / (constants.LAYER_SHARE * self.gpu.product_rate)
        ) + self._sums(batch)
        if self.eager:
            device = max(device, self._operations * constants.EAGER_OPERATION_S)
        sampling = constants.LOGIT_S * batch * self.shape.vocabulary
        return device + constants.STEP_S + constants.REQUEST_S * running + sampling

    def prefill(self, tokens: float) -> float:
        """Seconds to read this many tokens of prompts."""
        products = 2 * self._active * tokens / self.workers
        sums = self._sums(tokens) - self._sums(0.0)
        return products / (constants.LAYER_SHARE * self.gpu.product_rate) + sums

    def seeing(self, image_tokens: float) -> float:
        """Seconds of the tower for the images of one prompt."""
        if self.shape.tower is None or not image_tokens:
            return 0.0
        products = self.shape.tower.flops_of_tokens(image_tokens) / self.tensor
        return products / (constants.LAYER_SHARE * self.gpu.product_rate)

    @cached_property
    def _parameters(self) -> tuple[float, float]:
        """Parameters that every step reads, and those of routed experts."""
        sizes = [layer_parameters(self.shape, layer) for layer in range(self.shape.layers)]
        dense = vocabulary_parameters(self.shape) / 2 + sum(size.dense for size in sizes)
        return dense, sum(size.experts for size in sizes)

    def _weights_read(self, batch: float) -> float:
        """Bytes of weights that a worker reads in a step: all, but of experts those that some token is sent to."""
        (read, routed), experts = self._parameters, self.shape.experts
        if experts is not None:
            read += routed * (1 - (1 - experts.per_token / experts.count) ** batch)
        return ELEMENT * read / self.workers * self.stages

    def _sums(self, batch: float) -> float:
        """Two sums over the tensor-parallel workers in each layer."""
        return 2 * self.shape.layers * Links(self.gpu).summed(ELEMENT * self.shape.hidden * batch, self.tensor)

    @cached_property
    def _operations(self) -> int:
        """Operations that the host starts in a step."""
        counts, found = constants.OPERATIONS, 0
        for layer in range(self.shape.layers):
            found += counts[self._attention(layer)]
            found += counts["experts" if self.shape.has_experts(layer) else "dense"]
            if self.shape.experts is not None and self.shape.has_experts(layer) and self.shape.experts.shared_ffn:
                found += counts["shared"]
            found += counts["parallel"] if self.tensor > 1 else 0
        return found

    def _attention(self, layer: int) -> str:
        if self.shape.has_recurrence(layer):
            return "recurrent"
        return "attention" if self.shape.latent is None else "latent"


def replica_of(spec: JobSpec, shape: ModelShape, engine: str, gpu: Gpu) -> Replica:
    """The replica that a job starts with `engine`, one of `ENGINES`. Raises InvalidJob for one whose steps no formula
    predicts."""
    memory, options = predict_replica(spec, shape, engine, gpu.memory), spec.rollout.options_of(engine)
    if (copies := ENGINES[engine].copies(options)) > 1:
        field = spec.rollout.field_of(engine, ENGINES[engine].copies_option)
        reason = "the steps of several data-parallel ranks are not predicted"
        raise refused(field, copies, reason, "leave it out to plan; millrace validate predicts its memory.")
    cache_bytes = cache_bytes_per_token(spec, shape, memory.workers)
    cached = memory.cached_tokens
    if not ENGINES[engine].memory_option:
        cached = max(0, int(((1 - HEADROOM) * gpu.memory - memory.ledger.total) / cache_bytes))
    return Replica(
        gpu=gpu,
        shape=shape,
        workers=memory.workers,
        stages=int(_first(options, PIPELINE_OPTIONS) or 1),
        slots=int(_first(options, SLOT_OPTIONS) or SLOTS),
        cached_tokens=cached,
        cache_bytes=cache_bytes,
        state_tokens=memory.state_bytes / cache_bytes,
        eager=bool(_first(options, EAGER_OPTIONS)),
        memory=memory,
    )


def _first(options: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((options[name] for name in names if options.get(name)), None)
