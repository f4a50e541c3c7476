"""Measures what a rank's memory holds in each phase of a job, and says what held it where it runs out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import torch

from millrace.errors import InvalidJob, InvalidState, OutOfMemory
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import KEPT, Ledger, Part, Phase, Prediction
from millrace.memory.prediction import predict
from millrace.memory.shape import decoder_shape
from millrace.memory.text import GIB
from millrace.spec import JobSpec
from services.trainer.memory import exhausted
from services.trainer.memory.measured import measured
from services.trainer.protocol.backend import Backend

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PASSES = {
    "old_log_prob": Phase.SCORING,
    "ref": Phase.SCORING,
    "values": Phase.SCORING,
    "update_critic": Phase.UPDATE,
    "update_actor": Phase.UPDATE,
}
"""The phase of each timed part of a step that computes on the device."""


@dataclass
class PhaseMemory:
    """The most that a phase has held, bytes."""

    kept: dict[Part, float] = field(default_factory=dict)
    """Each part at its largest."""
    offloaded: float = 0.0
    """In host memory, for a device that has memory of its own."""
    peak: float = 0.0
    """Of the device's allocator; 0 on a CPU."""
    activations: float = 0.0
    """What a micro-batch's forward pass left for its backward pass; 0 on a CPU."""

    def add(self, ledger: Ledger, reached: float) -> None:
        for part, size in ledger.device.items():
            self.kept[part] = max(self.kept.get(part, 0.0), size)
        self.offloaded = max(self.offloaded, sum(ledger.host.values()))
        self.peak = max(self.peak, reached)


class MemoryMeter:
    """The memory of one rank, for one loaded job."""

    def __init__(self, spec: JobSpec, backend: Backend, rank: int, ranks: int) -> None:
        self.spec = spec
        self.step = 0
        self.token_budget = spec.trainer.token_budget
        """Of the step that runs."""
        self.tokens = 0
        """Of this rank's largest micro-batch in that step."""
        self.updated = False
        """Whether an update of that step has begun to write weights."""
        self.shape = _shape(spec)
        self.rank, self.ranks = rank, ranks
        self.backend = backend
        self._phases: dict[Phase, PhaseMemory] = {}
        self._allocated = self._reserved = 0.0
        self._before_pass: float | None = None
        """What the device held besides the kept parts when a part of the step began; None after its first loss."""
        self._on_gpu = backend.device.type == "cuda"
        self.measure(Phase.LOAD)

    def begin_step(self, step: int, token_budget: int) -> None:
        """The step's phases are measured anew; loading and the last publication stay."""
        self.step, self.token_budget, self.updated = step, token_budget, False
        for phase in (Phase.SCORING, Phase.UPDATE):
            self._phases.pop(phase, None)

    def measure(self, phase: Phase) -> None:
        """Adds what is held now, and the peak since the last measurement, to the phase."""
        self._phases.setdefault(phase, PhaseMemory()).add(measured(self.backend), self._peak())

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Measures a part of a step, one of `exhausted.WORK`. Raises OutOfMemory where the device has no memory
        left."""
        phase = PASSES.get(part)
        if phase is not None:
            self._peak()
            self._before_pass = self._passing()
        failure: OutOfMemory | None = None
        try:
            yield
        except torch.OutOfMemoryError:
            failure = exhausted.failure(self, part, phase or Phase.UPDATE)
        if failure is not None:
            raise failure
        if phase is not None:
            self.measure(phase)

    def watched(self, loss: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """The loss of an update, which also measures activations: it is called when the forward pass of a micro-batch
        has ended and its backward pass has not begun. Gradients of later micro-batches would be in the way, so the
        first one of each part of a step is measured."""

        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            if self._before_pass is not None:
                found = self._phases.setdefault(Phase.UPDATE, PhaseMemory())
                found.activations = max(found.activations, self._passing() - self._before_pass)
                self._before_pass = None
            return loss(*arguments, **named)

        return call

    def _passing(self) -> float:
        """Bytes on the device besides the kept parts; 0 on a CPU."""
        if not self._on_gpu:
            return 0.0
        return torch.cuda.memory_allocated(self.backend.device) - measured(self.backend).total

    def metrics(self) -> dict[str, float]:
        """Step metrics in GiB, with the same names on every rank."""
        self._peak()
        values = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / GIB}
        if self._on_gpu:
            values["perf/max_memory_allocated_gb"] = self._allocated / GIB
            values["perf/max_memory_reserved_gb"] = self._reserved / GIB
        for phase, found in self._phases.items():
            values |= {f"memory/{phase}/{part}": found.kept.get(part, 0.0) / GIB for part in self._parts()}
            if self._on_gpu:
                rest = max(0.0, found.peak - sum(found.kept.values()))
                values[f"memory/{phase}/offloaded"] = found.offloaded / GIB
                values[f"memory/{phase}/rest"] = rest / GIB
                values[f"memory/{phase}/peak"] = found.peak / GIB
                if phase is Phase.UPDATE:
                    values[f"memory/{phase}/activations"] = found.activations / GIB
        for phase, ledger in self._predicted().items():
            if phase in self._phases:
                values |= _predicted_metrics(f"memory/{phase}/predicted", ledger, on_gpu=self._on_gpu)
        return values

    def _predicted(self) -> Prediction:
        """What was predicted for micro-batches of the step's token budget; empty for a model whose config does not tell
        its sizes."""
        if self.shape is None:
            return {}
        try:
            return predict(self.spec, self.shape, self.ranks, self.token_budget)
        except (InvalidJob, InvalidState):
            return {}

    def _parts(self) -> list[Part]:
        """The parts that the job has, on any rank."""
        algorithm, adapted = self.spec.algorithm, self.spec.model.lora is not None
        absent = {Part.GRADIENTS, Part.OPTIMIZER, Part.REFERENCE} if adapted else {Part.ADAPTER}
        if algorithm.kl is None:
            absent.add(Part.REFERENCE)
        if algorithm.critic is None:
            absent.add(Part.CRITIC)
        return [part for part in KEPT if part not in absent]

    def _peak(self) -> float:
        """The allocator's peak since the last call, bytes; 0 on a CPU."""
        if not self._on_gpu:
            return 0.0
        reached = torch.cuda.max_memory_allocated(self.backend.device)
        self._allocated = max(self._allocated, reached)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.backend.device))
        torch.cuda.reset_peak_memory_stats(self.backend.device)
        return float(reached)


def _predicted_metrics(prefix: str, ledger: Ledger, *, on_gpu: bool) -> dict[str, float]:
    """The metrics of one phase, GiB."""
    found = {f"{prefix}/{part}": size / GIB for part, size in ledger.largest_first()}
    rest = sum(size for part, size in ledger.device.items() if part not in KEPT)
    found |= {f"{prefix}/rest": rest / GIB, f"{prefix}/peak": ledger.total / GIB}
    if on_gpu:
        found[f"{prefix}/offloaded"] = sum(ledger.host.get(part, 0.0) for part in KEPT) / GIB
    return found


def _shape(spec: JobSpec) -> ModelShape | None:
    try:
        return decoder_shape(Path(spec.model.path))
    except InvalidJob:
        return None
