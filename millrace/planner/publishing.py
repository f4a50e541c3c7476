"""Seconds of a publication, and of changing weights if trainer and engine take turns on the same GPUs."""

from dataclasses import dataclass

from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.adapters import adapter_parameters
from millrace.memory.layers import linear_layers
from millrace.memory.ledger import Part
from millrace.memory.staging import element_bytes, published_bytes
from millrace.planner import constants
from millrace.planner.hardware import Links
from millrace.planner.replica import Replica
from millrace.spec import JobSpec

NORMS = 2
"""Norms of a layer, without those of queries and keys."""


@dataclass(frozen=True)
class PublicationTimes:
    bytes: float
    """Bytes of one copy of what is published."""
    seconds: float
    """Seconds from the first message to the last."""
    pause: float
    """Seconds of it in which a replica does not generate."""
    commit: str


def publication_times(
    spec: JobSpec, shape: ModelShape, replica: Replica, *, trainer_gpus: int, rollout_gpus: int
) -> PublicationTimes:
    """A publication from the trainer's GPUs to all replicas. Every worker receives its part, and replicas pass contents
    on to each other, so that the trainer sends each byte once."""
    size = _size(spec, shape)
    links = Links(replica.gpu)
    one_host = trainer_gpus + rollout_gpus <= replica.gpu.gpus_per_host
    rate = links.within if one_host else links.across
    if spec.publication.path == "gather_broadcast":
        seconds = size / rate + constants.GATHERED_TENSOR_S * tensors(shape)
        return PublicationTimes(size, seconds, seconds, "inplace")
    part = size / replica.workers
    transfer = max(size / trainer_gpus, part) / rate
    unpacking = constants.CUT_PIECE_S * tensors(shape) if replica.tensor > 1 and shape.experts is not None else 0.0
    commit = _commit(spec, replica, part)
    if commit == "inplace":
        seconds = transfer + unpacking + constants.PUBLICATION_S
        return PublicationTimes(size, seconds, seconds, commit)
    pause = unpacking + constants.COMMIT_PASSES * part / replica.gpu.memory_rate
    return PublicationTimes(size, transfer + pause + constants.PUBLICATION_S, pause, commit)


def _commit(spec: JobSpec, replica: Replica, part: float) -> str:
    """`auto` is shadow if a whole version fits beside the engine."""
    if spec.publication.commit != "auto":
        return spec.publication.commit
    return "shadow" if replica.memory.ledger.device.get(Part.STAGING, 0.0) >= part else "inplace"


def _size(spec: JobSpec, shape: ModelShape) -> float:
    if spec.model.lora is None or spec.model.lora.merge:
        return published_bytes(spec, shape)
    return element_bytes(spec.rollout.dtype) * adapter_parameters(shape, spec.model.lora)


def turn_seconds(spec: JobSpec, shape: ModelShape) -> float:
    """Seconds until an engine on the trainer's own GPUs has the new weights."""
    return _size(spec, shape) / constants.TURNS_BYTES_S


def tensors(shape: ModelShape) -> int:
    """Number of tensors in the model's folder."""
    found = 2 + (0 if shape.tied else 1)
    for layer in range(shape.layers):
        found += len(linear_layers(shape, layer)) + NORMS
        found += 2 if shape.query_key_norm or shape.latent is not None else 0
        found += 3 if shape.attention_bias else 0
        experts = shape.experts
        if experts is not None and shape.has_experts(layer):
            found += 3 * experts.count + 1 + (1 if experts.bias else 0)
    return found
