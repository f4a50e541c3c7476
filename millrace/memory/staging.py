"""Memory that a publication takes in addition to the weights."""

from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.adapters import adapter_parameters, without_experts
from millrace.memory.layers import layer_parameters, linear_layers, parameters
from millrace.spec import JobSpec
from millrace.weights.plans.sharded import MESSAGE_BYTES

ROUNDS = 3
"""Rounds of a plan in flight: `SLOTS` in `millrace/weights/transfer/pipeline.py`."""

MERGED_COPIES = 3
"""Copies in float32 of a weight that is merged with its adapter: the weight, the adapter's product, and their sum."""


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a job's dtype."""
    return 4 if dtype == "float32" else 2


def published_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """Bytes of one copy of the weights in the dtype of the engines, with a trained tower."""
    return element_bytes(spec.rollout.dtype) * parameters(shape, with_tower=spec.trainer.train_tower)


def replica_bytes(spec: JobSpec, shape: ModelShape, copies: int) -> float:
    """Bytes of the weights that the workers of a replica hold together: one copy of the experts, and `copies` of the
    rest."""
    experts = sum(layer_parameters(shape, layer).experts for layer in range(shape.layers))
    once = element_bytes(spec.rollout.dtype) * experts
    return once + copies * (published_bytes(spec, shape) - once)


def sender_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """Buffers on a rank of the trainer: the messages of the rounds in flight, and, if weights are merged with an
    adapter, one of them at a time. If tensors are gathered, the largest one twice."""
    if spec.publication.path == "gather_broadcast":
        return 2.0 * 4 * shape.vocabulary * shape.hidden
    rounds = min(ROUNDS * MESSAGE_BYTES, _each_time(spec, shape))
    if spec.model.lora is None or not spec.model.lora.merge:
        return rounds
    matrices = (matrix for layer in range(shape.layers) for matrix in linear_layers(shape, layer).values())
    return rounds + MERGED_COPIES * 4 * max(inputs * outputs for inputs, outputs in matrices)


def snapshot_bytes(spec: JobSpec, shape: ModelShape, ranks: int) -> float:
    """Bytes in host memory of one of the trainer's `ranks`: the messages that it sent last, if only what changed is
    sent. They are for one replica; with more, at most as many times as the trainer has ranks for each worker of a
    replica. An adapter travels whole."""
    if spec.publication.path != "delta" or (spec.model.lora is not None and not spec.model.lora.merge):
        return 0.0
    return published_bytes(spec, shape) / ranks


def _each_time(spec: JobSpec, shape: ModelShape) -> float:
    """Bytes that each publication sends: the adapter alone, or all weights."""
    if spec.model.lora is None or spec.model.lora.merge:
        return published_bytes(spec, shape)
    return element_bytes(spec.rollout.dtype) * adapter_parameters(shape, without_experts(spec.model.lora))


def receiver_bytes(spec: JobSpec, shape: ModelShape, workers: int, copies: int = 1) -> float:
    """Buffers on one of a replica's `workers`: a whole version in spare memory, or the messages of the rounds in
    flight. Whole tensors come into host memory, and to the device one at a time. `copies`: as in `replica_bytes`."""
    if spec.publication.path == "gather_broadcast":
        return float(element_bytes(spec.rollout.dtype) * shape.vocabulary * shape.hidden)
    whole = (_each_time(spec, shape) if copies == 1 else replica_bytes(spec, shape, copies)) / workers
    return min(ROUNDS * MESSAGE_BYTES, whole) if spec.publication.commit == "inplace" else whole


def receiver_host_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """Host memory of each of a replica's workers: every tensor whole, if tensors are gathered and broadcast."""
    return published_bytes(spec, shape) if spec.publication.path == "gather_broadcast" else 0.0
