"""Memory that a publication takes in addition to the weights."""

from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.layers import adapter_parameters, parameters
from millrace.spec import JobSpec
from millrace.weights.plans.sharded import MESSAGE_BYTES

ROUNDS = 3
"""Rounds of a plan in flight: `SLOTS` in `millrace/weights/transfer/pipeline.py`."""


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a job's dtype."""
    return 4 if dtype == "float32" else 2


def published_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """Bytes of one copy of the weights in the dtype of the engines."""
    return element_bytes(spec.rollout.dtype) * parameters(shape)


def sender_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """On a rank of the trainer: the messages of the rounds in flight. Where tensors are gathered, or merged with an
    adapter, the largest one twice."""
    if spec.publication.path == "gather_broadcast" or (spec.model.lora is not None and spec.model.lora.merge):
        return 2.0 * 4 * shape.vocabulary * shape.hidden
    return min(ROUNDS * MESSAGE_BYTES, _each_time(spec, shape))


def _each_time(spec: JobSpec, shape: ModelShape) -> float:
    """Bytes that each publication sends: the adapter alone, or all weights."""
    if spec.model.lora is None or spec.model.lora.merge:
        return published_bytes(spec, shape)
    return element_bytes(spec.rollout.dtype) * adapter_parameters(shape, spec.model.lora)


def receiver_bytes(spec: JobSpec, shape: ModelShape, workers: int) -> float:
    """On one of a replica's `workers`: a whole version in spare memory, or the messages of the rounds in flight."""
    whole = _each_time(spec, shape) / workers
    return min(ROUNDS * MESSAGE_BYTES, whole) if spec.publication.commit == "inplace" else whole
