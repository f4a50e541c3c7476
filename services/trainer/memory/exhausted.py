"""What is said where a rank's memory has run out: what held it, and which settings would help most."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.errors import InvalidJob, InvalidState, OutOfMemory, PublicationFailed
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import Phase
from millrace.memory.prediction import predict
from millrace.memory.savings import savings
from millrace.memory.shape import decoder_shape
from millrace.memory.text import SHOWN, by_part, gib
from millrace.spec import JobSpec
from millrace.spec.trainer import Role
from services.trainer.memory.garbage import free_unreachable
from services.trainer.memory.measured import measured
from services.trainer.protocol.backend import Backend, models
from services.trainer.ranks import collectives

if TYPE_CHECKING:
    from services.trainer.memory.meter import MemoryMeter

WORK = {
    "fetch": "putting a batch on the device",
    "old_log_prob": "computing log-probabilities",
    "ref": "computing log-probabilities of the reference",
    "values": "computing the critic's values",
    "adv": "computing advantages",
    "update_critic": "the critic's update",
    "update_actor": "the policy's update",
    "report": "gathering what the step reports",
}
"""What a part of a step does, in words."""
ROLE: dict[str, Role] = {"ref": "reference", "values": "critic", "update_critic": "critic"}
"""The role whose micro-batches a part of a step computes, where it is not the policy."""


def failure(meter: "MemoryMeter", part: str, phase: Phase) -> OutOfMemory:
    """The error for a rank that ran out of memory in a part of a step, whose prediction is that of `phase`. It is made
    while the failed pass still holds its tensors."""
    held = measured(meter.backend)
    parts = [by_part(held)]
    if meter.backend.device.type == "cuda":
        allocated = torch.cuda.memory_allocated(meter.backend.device)
        whole = torch.cuda.get_device_properties(meter.backend.device).total_memory
        parts = [
            f"activations and temporary tensors {gib(max(0.0, allocated - held.total))}, {parts[0]};"
            f" {gib(allocated)} of {gib(whole)} were allocated"
        ]
    what = (
        f"rank {meter.rank} ran out of memory in {WORK[part]}, step {meter.step}, {_sizes(meter, part)}."
        f" It held: {parts[0]}."
    )
    tokens = meter.tokens or meter.token_budget
    return OutOfMemory(what, _fix(meter.spec, meter.shape, meter.ranks, tokens, phase, in_step=True))


def _sizes(meter: "MemoryMeter", part: str) -> str:
    """How large the micro-batches of that part are, as far as it is known."""
    if (role := ROLE.get(part)) is None:
        return f"with micro-batches of up to {meter.tokens:,} tokens"
    budget = meter.spec.trainer.lowered_to(meter.token_budget).of(role).token_budget
    return f"with a token budget of {budget:,}"


@contextmanager
def told_at(work: str, phase: Phase, spec: JobSpec, rank: int, ranks: int) -> Iterator[None]:
    """Raises OutOfMemory, with the predicted parts, where there is no memory left outside of a step."""
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:
        failed = True
    if failed:
        raise OutOfMemory(*_said(f"rank {rank} ran out of memory", work, phase, spec, ranks))


@contextmanager
def as_error() -> Iterator[None]:
    """Raises OutOfMemory in place of torch's error, for `fail_together`: it says which rank, and `told_by_all` the
    rest. The tensors of what failed are freed before."""
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:
        failed = True
    if failed:
        raise OutOfMemory(f"rank {collectives.rank()} ran out of memory")


@contextmanager
def told_by_all(work: str, phase: Phase, spec: JobSpec, device: torch.device, ranks: int) -> Iterator[None]:
    """Raises PublicationFailed, with the predicted parts, in place of an OutOfMemory that every rank raises: no rank
    waits for another, so the trainer goes on."""
    who = ""
    try:
        yield
    except OutOfMemory as error:
        who = error.what
    if who:
        free_unreachable(device)
        raise PublicationFailed(*_said(who, work, phase, spec, ranks))


def _said(who: str, work: str, phase: Phase, spec: JobSpec, ranks: int) -> tuple[str, str]:
    """What is said where there is no memory left outside of a step, and the fix."""
    shape, predicted = None, ""
    try:
        shape = decoder_shape(Path(spec.model.path))
        predicted = f" Predicted for it: {by_part(predict(spec, shape, ranks)[phase])}."
    except (InvalidJob, InvalidState):
        pass  # the config does not tell the model's sizes
    return f"{who} in {work}.{predicted}", _fix(spec, shape, ranks, spec.trainer.token_budget, phase, in_step=False)


def _fix(spec: JobSpec, shape: ModelShape | None, ranks: int, tokens: int, phase: Phase, *, in_step: bool) -> str:
    """The settings that would save most in that phase, and the one with which the job would repeat a step."""
    found = [] if shape is None else savings(spec, shape, ranks, tokens, phase)[:SHOWN]
    settings = [f"set {saving} (saves about {gib(saving.bytes)})" for saving in found]
    if in_step and spec.trainer.on_out_of_memory == "fail":
        settings.append("set trainer.on_out_of_memory: halve_budget to go on with half the token budget")
    return " or ".join([*settings, "train on more GPUs"]) + "."


def recover(backend: Backend) -> None:
    """Frees what an interrupted pass left on this rank: its activations, gradients and gathered weights."""
    for model in models(backend).values():
        model.abandon_pass()
    free_unreachable(backend.device)
