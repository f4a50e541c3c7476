"""The prediction for a job: the trainer's fullest rank in each phase, and one worker of a replica."""

from dataclasses import dataclass, field

from millrace.backends import BACKENDS
from millrace.descriptors import imported
from millrace.engines import ENGINES
from millrace.errors import InvalidState
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import Ledger, Part, Prediction
from millrace.memory.staging import element_bytes, receiver_bytes, receiver_host_bytes, replica_bytes
from millrace.spec import JobSpec

WORKING = 2e9
"""Bytes that an engine takes for activations and captured graphs; measured by none of our runs apart."""

SPARE = 0.8
"""Share of the free memory into which a version has to fit to be received during generation."""


def predict(spec: JobSpec, shape: ModelShape, ranks: int, tokens: int | None = None) -> Prediction:
    """The peak of each phase on the fullest of the trainer's `ranks` ranks, with micro-batches of `tokens` tokens:
    without a value of the whole token budget. Raises InvalidState for a number of ranks that the options do not allow.
    """
    backend = BACKENDS[spec.trainer.backend]
    multiple = backend.ranks_multiple(backend.options.model_validate(spec.trainer.backend_options))
    if ranks % multiple:
        what = f"{ranks} GPUs of the trainer: the job's options need a multiple of {multiple}."
        raise InvalidState(what, f"give {multiple} GPUs or a multiple of that.")
    found: Prediction = imported(backend.memory)(spec, shape, ranks, tokens or spec.trainer.token_budget)
    return found


def fewest_ranks(spec: JobSpec) -> int:
    """The smallest number of ranks of the trainer that the job's options allow."""
    backend = BACKENDS[spec.trainer.backend]
    return backend.ranks_multiple(backend.options.model_validate(spec.trainer.backend_options))


@dataclass(frozen=True)
class ReplicaPrediction:
    """Memory of one worker of a replica."""

    engine: str
    workers: int
    ledger: Ledger
    cached_tokens: int = field(default=0)
    """Tokens whose keys and values fit, in the caches of all copies of the attention."""
    state_bytes: float = field(default=0.0)
    """Bytes of the states of one request in recurrent layers, in the same memory. None of them is in `cached_tokens`.
    """


def predict_replica(spec: JobSpec, shape: ModelShape, engine: str, gpu_bytes: float) -> ReplicaPrediction:
    """What a worker of `engine` does with a GPU of `gpu_bytes`. Engines take a share of the GPU, and keep keys and
    values in what weights and work leave of it. A publication's buffers come on top."""
    descriptor, options = ENGINES[engine], spec.rollout.options_of(engine)
    workers = descriptor.world_size(options)
    share = float(options.get(descriptor.memory_option) or descriptor.memory_share)
    copies = descriptor.copies(options)
    weights = replica_bytes(spec, shape, copies)
    if spec.data.images is not None and shape.tower is not None and not spec.trainer.train_tower:
        weights += element_bytes(spec.rollout.dtype) * shape.tower.parameters
    weights /= workers
    cache = max(0.0, share * gpu_bytes - weights - WORKING) if descriptor.memory_option else 0.0
    staging = receiver_bytes(spec, shape, workers, copies)
    if spec.publication.commit == "auto" and staging > SPARE * (gpu_bytes - weights - WORKING - cache):
        inplace = spec.publication.model_copy(update={"commit": "inplace"})
        staging = receiver_bytes(spec.model_copy(update={"publication": inplace}), shape, workers, copies)
    device = {
        Part.WEIGHTS: weights,
        Part.ACTIVATIONS: WORKING,
        Part.KV_CACHE: cache,
        Part.STAGING: staging,
    }
    ledger = Ledger(device, {Part.STAGING: receiver_host_bytes(spec, shape)})
    attending = workers // copies
    tokens = copies * int(cache / cache_bytes_per_token(spec, shape, attending))
    return ReplicaPrediction(engine, workers, ledger, tokens, state_bytes_per_request(spec, shape, attending))


def cache_bytes_per_token(spec: JobSpec, shape: ModelShape, workers: int = 1) -> float:
    """Bytes of one token's keys and values on one of `workers` tensor-parallel workers."""
    element = element_bytes(spec.rollout.dtype)
    if shape.latent is not None:
        return float(shape.layers * (shape.latent.key_value_rank + shape.latent.rotary_dim) * element)
    heads = max(1.0, shape.key_value_heads / workers)
    return 2 * shape.attending * heads * shape.head_dim * element


def state_bytes_per_request(spec: JobSpec, shape: ModelShape, workers: int = 1) -> float:
    """Bytes that a request's recurrent layers keep on one of `workers` tensor-parallel workers, however long it is: the
    state, and the last inputs of the convolution."""
    if (of := shape.recurrence) is None:
        return 0.0
    element = element_bytes(spec.rollout.dtype)
    layer = of.state * (of.state_bytes or element) + of.channels * (of.window - 1) * element
    return sum(of.layers) * layer / workers
