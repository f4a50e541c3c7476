"""What is said if a rank's memory has run out: what held it, and which settings would help most."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from millrace.errors import InvalidJob, InvalidState, OutOfMemory, PublicationFailed
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import Phase
from millrace.memory.prediction import predict
from millrace.memory.savings import savings
from millrace.memory.shape import decoder_shape
from millrace.memory.text import SHOWN, by_part, gib
from millrace.spec import JobSpec
from services.trainer.protocol.backend import Backend, models
from services.trainer.ranks import collectives


@contextmanager
def report_out_of_memory(work: str, phase: Phase, spec: JobSpec, rank: int, ranks: int) -> Iterator[None]:
    """Raises OutOfMemory, with the predicted parts, if there is no memory left outside of a step."""
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:
        failed = True
    if failed:
        raise OutOfMemory(*_message_and_fix(f"rank {rank} ran out of memory", work, phase, spec, ranks))


@contextmanager
def as_error() -> Iterator[None]:
    """Raises OutOfMemory in place of torch's error, for `fail_together`. It names the rank;
    `report_out_of_memory_on_all_ranks` adds the rest. The tensors of what failed are freed before."""
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:
        failed = True
    if failed:
        raise OutOfMemory(f"rank {collectives.rank()} ran out of memory")


@contextmanager
def report_out_of_memory_on_all_ranks(
    work: str, phase: Phase, spec: JobSpec, device: torch.device, ranks: int
) -> Iterator[None]:
    """Raises PublicationFailed, with the predicted parts, in place of an OutOfMemory that every rank raises: no rank
    waits for another, so the trainer goes on."""
    who = ""
    try:
        yield
    except OutOfMemory as error:
        who = error.what
    if who:
        free_unreachable(device)
        raise PublicationFailed(*_message_and_fix(who, work, phase, spec, ranks))


def _message_and_fix(who: str, work: str, phase: Phase, spec: JobSpec, ranks: int) -> tuple[str, str]:
    """What is said if there is no memory left outside of a step, and the fix."""
    shape, predicted = None, ""
    try:
        shape = decoder_shape(Path(spec.model.path))
        predicted = f" Predicted for it: {by_part(predict(spec, shape, ranks)[phase])}."
    except (InvalidJob, InvalidState):
        pass  # the config does not say the model's sizes
    return f"{who} in {work}.{predicted}", fix_of(spec, shape, ranks, spec.trainer.token_budget, phase, in_step=False)


def fix_of(spec: JobSpec, shape: ModelShape | None, ranks: int, tokens: int, phase: Phase, *, in_step: bool) -> str:
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


PASSES = 4


def free_unreachable(device: torch.device) -> None:
    """Frees what only reference cycles hold, and gives it back to the device.

    One pass of the collector does not see a cycle through an autograd node that has a second owner in C++ (torch's
    `THPCppFunction` shows its hooks only if it is the only owner): such a model goes in the pass after the one that
    frees the other owner.
    """
    for _ in range(PASSES):
        if not gc.collect():
            break
    if device.type == "cuda":
        torch.cuda.empty_cache()


def forget_models(device: torch.device) -> None:
    """Frees the models of a job that has ended. The code that was compiled for their layers goes too: torch compiles a
    layer's class for at most eight kinds of input and runs it uncompiled after that, over all jobs of a process."""
    if "torch._dynamo" in sys.modules:  # nothing was compiled otherwise, and the import takes seconds
        torch.compiler.reset()
    free_unreachable(device)
