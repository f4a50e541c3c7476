"""Checks whether the ranks of a group can share micro-batches of a model (`sequence_parallel_size`), before a rank
builds it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.backends.fsdp2 import Fsdp2Options, parse
from millrace.data.model_folder import text_config
from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.sequence_cost import recurrence_by_layer
from millrace.spec import JobSpec
from millrace.spec.trainer import ROLES, Role

NAME = "sequence_parallel_size"
FIELD = f"trainer.backend_options.{NAME}"
HEADS = ("num_attention_heads", "num_attention_heads_per_layer")
CONFIG_ENTRIES = (*HEADS, "layer_types")
"""Entries of a model's config (of its text part) that the rules read."""
SPLIT = ("auto", "varlen", "segments", "flash_attention_4")
"""Attention implementations with which ranks can share a micro-batch."""


def mistakes_of(spec: JobSpec) -> Iterator[Mistake]:
    """Every rule that a job breaks, as far as it is known without a trainer."""
    options, critic = parse(spec.trainer.backend_options), spec.algorithm.critic
    if options.sequence_parallel_size > 1:
        yield from _broken_rules(options, text_config(Path(spec.model.path)), FIELD)
        if spec.data.images is not None:
            reason = "ranks do not share the images of a micro-batch, and data.images is given"
            yield wrong_value(FIELD, options.sequence_parallel_size, reason, "set it to 1.")
    for role in ROLES:
        yield from _not_shared(options.sequence_parallel_size, parse(spec.trainer.of(role).backend_options), role)
    own = parse(spec.trainer.of("critic").backend_options)
    if own.sequence_parallel_size > 1 and critic is not None and critic.path is not None:
        field = _field("critic") if NAME in spec.trainer.critic.backend_options else FIELD
        yield from _broken_rules(own, text_config(Path(critic.path), "algorithm.critic.path"), field)


def check(options: Fsdp2Options, config: Mapping[str, Any]) -> None:
    """Raises InvalidJob with every rule that a model with this config breaks."""
    if options.sequence_parallel_size > 1 and (broken := list(_broken_rules(options, config, FIELD))):
        raise InvalidJob.of(broken)


def check_role(policy: int, own: Fsdp2Options, role: Role) -> None:
    """Raises InvalidJob if a role cannot have its own size beside that of the policy."""
    if broken := list(_not_shared(policy, own, role)):
        raise InvalidJob.of(broken)


def _field(role: Role) -> str:
    return f"trainer.{role}.backend_options.{NAME}"


def _not_shared(policy: int, own: Fsdp2Options, role: Role) -> Iterator[Mistake]:
    if policy % (size := own.sequence_parallel_size):
        reason = f"the {policy} ranks that share the policy's micro-batches do not divide into groups of {size}"
        yield wrong_value(_field(role), size, reason, f"choose a divisor of {policy}, or another {FIELD}.")


def _broken_rules(options: Fsdp2Options, config: Mapping[str, Any], field: str) -> Iterator[Mistake]:
    size = options.sequence_parallel_size
    if options.attention not in SPLIT:
        reason = f"{options.attention} attention cannot be divided over ranks"
        yield wrong_value(field, size, reason, "leave trainer.backend_options.attention out, or set this to 1.")
    if any(recurrence_by_layer(config)):
        reason = (
            "the recurrence of the model's linear attention runs over whole sequences, which ranks would have slices of"
        )
        yield wrong_value(field, size, reason, "set it to 1.")
    heads = {config.get("num_attention_heads"), *(config.get("num_attention_heads_per_layer") or ())} - {None}
    for count in sorted(count for count in heads if isinstance(count, int)):
        if count % size:
            reason = f"the model's {count} attention heads do not divide by it"
            yield wrong_value(field, size, reason, f"choose a divisor of {count}.")
