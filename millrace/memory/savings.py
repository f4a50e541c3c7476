"""The settings that would lower a job's peak, each with what it saves: the difference of two predictions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.backends import BACKENDS
from millrace.errors import InvalidJob, InvalidState
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import Phase, peak
from millrace.memory.prediction import predict
from millrace.spec import JobSpec, parse
from millrace.spec.document import merged
from millrace.spec.trainer import ROLES

OPTIONS = "trainer.backend_options"
PLACE = "offload_parameters"
"""The option of fsdp2 that puts a model into host memory."""
SMALLEST_CHUNK = 256
MOST_TOGETHER = 6
"""Settings that are put together."""
LEAST = 0.01
"""Share of the peak under which a saving is not worth a line."""


@dataclass(frozen=True)
class Saving:
    """What one setting would save."""

    field: str
    value: Any
    bytes: float
    """The bytes by which the peak of the fullest rank falls, in the job or in one phase of it."""
    total: float
    """The peak that is left, bytes."""

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.field}: {value}"


def savings(
    spec: JobSpec, shape: ModelShape, ranks: int, tokens: int | None = None, phase: Phase | None = None
) -> list[Saving]:
    """Each setting that the job does not have yet and that lowers the peak, the one that saves most first. None of them
    changes what is trained. `tokens`: of a micro-batch, if not the whole token budget. `phase`: whose peak is to fall,
    if not that of the whole job."""
    tokens = tokens or spec.trainer.token_budget
    before, found = _peak(spec, shape, ranks, tokens, phase), []
    for field, value in _candidates(spec, tokens):
        changed = _with(spec, field, value)
        if changed is None:
            continue
        try:
            budget = min(tokens, changed.trainer.token_budget)
            after = _peak(changed, shape, ranks, budget, phase)
        except (InvalidState, InvalidJob):
            continue
        if before - after > LEAST * before:
            found.append(Saving(field, value, before - after, after))
    return sorted(found, key=lambda saving: -saving.bytes)


def together(spec: JobSpec, shape: ModelShape, ranks: int, limit: float) -> tuple[list[Saving], float]:
    """The settings that bring the peak under `limit` bytes: at each turn the one that saves most of those that are
    left. Returns them and the peak with all of them; that is over the limit if even all of them do not help."""
    chosen: list[Saving] = []
    total = peak(predict(spec, shape, ranks)).total
    while total > limit and (found := savings(spec, shape, ranks)):
        best = found[0]
        changed = _with(spec, best.field, best.value)
        assert changed is not None
        spec, total = changed, best.total
        chosen.append(best)
        if len(chosen) == MOST_TOGETHER:
            break
    return chosen, total


def _peak(spec: JobSpec, shape: ModelShape, ranks: int, tokens: int, phase: Phase | None) -> float:
    predicted = predict(spec, shape, ranks, tokens)
    return (peak(predicted) if phase is None else predicted[phase]).total


def _candidates(spec: JobSpec, tokens: int) -> Iterator[tuple[str, Any]]:
    """Settings to try, those of the job's backend only."""
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    if (half := max(tokens // 2, longest)) < tokens:
        yield "trainer.token_budget", half
    if not spec.trainer.activation_recompute:
        yield "trainer.activation_recompute", True
    known, given = BACKENDS[spec.trainer.backend].options.model_fields, spec.trainer.backend_options
    for name, value in _options(given):
        if name in known and given.get(name, known[name].default) != value:
            yield f"{OPTIONS}.{name}", value
    in_host = spec.trainer.of("reference").backend_options.get(PLACE, False)
    if PLACE in known and spec.algorithm.kl is not None and spec.model.lora is None and not in_host:
        yield f"trainer.reference.backend_options.{PLACE}", True
    yield from _of_roles(spec, longest)


def _of_roles(spec: JobSpec, longest: int) -> Iterator[tuple[str, Any]]:
    """Values that reference and critic have of their own; others are the policy's."""
    there = {"reference": spec.algorithm.kl is not None and spec.model.lora is None, "critic": spec.algorithm.critic}
    for role in (role for role in ROLES if there[role]):
        own: Any = getattr(spec.trainer, role)
        budget = own.token_budget or 0
        if (half := max(budget // 2, longest)) < budget:
            yield f"trainer.{role}.token_budget", half
        if getattr(own, "activation_recompute", None) is False:
            yield f"trainer.{role}.activation_recompute", True
        for name, value in _options(own.backend_options):
            if own.backend_options.get(name, value) != value:
                yield f"trainer.{role}.backend_options.{name}", value


def _options(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in (PLACE, "offload_activations", "offload_reference", "offload_optimizer", "release_gradients"):
        yield name, True
    yield "optimizer_offload_fraction", 1.0
    yield "optimizer_moments", "bfloat16"
    yield "logprob_chunk_tokens", max(SMALLEST_CHUNK, given.get("logprob_chunk_tokens", 1024) // 4)
    sizes = ("tensor_parallel", "expert_parallel", "pipeline_parallel", "context_parallel", "sequence_parallel_size")
    for name in sizes:
        yield name, 2 * given.get(name, 1)


def _with(spec: JobSpec, field: str, value: Any) -> JobSpec | None:
    """The spec with another value of a field; None if a job cannot have it."""
    change: Any = value
    for name in reversed(field.split(".")):
        change = {name: change}
    try:
        return parse(merged(spec.model_dump(mode="json"), change))
    except InvalidJob:
        return None
