"""Measures what a rank's memory holds in each phase of a job, and says what held it if it runs out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from millrace.errors import InvalidJob, InvalidState, OutOfMemory
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import KEPT, Ledger, Part, Phase, Prediction
from millrace.memory.prediction import predict
from millrace.memory.shape import decoder_shape
from millrace.memory.text import GIB, by_part, gib
from millrace.spec import JobSpec
from millrace.spec.trainer import Role
from services.trainer.memory import exhausted
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
"""The role whose micro-batches a part of a step computes, if it is not the policy."""


@dataclass
class PhaseMemory:
    """The most that a phase has held, bytes."""

    kept: dict[Part, float] = field(default_factory=dict)
    """Each part at its largest."""
    offloaded: float = 0.0
    """Bytes in host memory, for a device that has memory of its own."""
    peak: float = 0.0
    """Peak of the device's allocator, bytes; 0 on a CPU."""
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
        """Token budget of the step that runs."""
        self.tokens = 0
        """Tokens of this rank's largest micro-batch in that step."""
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
        """Measures a part of a step, one of WORK. Raises OutOfMemory if the device has no memory
        left."""
        phase = PASSES.get(part)
        if phase is not None:
            self._peak()
            self._before_pass = self._passing()
        failed: OutOfMemory | None = None
        try:
            yield
        except torch.OutOfMemoryError:
            failed = failure(self, part, phase or Phase.UPDATE)
        if failed is not None:
            raise failed
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
        """What was predicted for micro-batches of the step's token budget; empty for a model whose config does not say
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


def failure(meter: MemoryMeter, part: str, phase: Phase) -> OutOfMemory:
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
    return OutOfMemory(what, exhausted.fix_of(meter.spec, meter.shape, meter.ranks, tokens, phase, in_step=True))


def _sizes(meter: MemoryMeter, part: str) -> str:
    """How large the micro-batches of that part are, as far as it is known."""
    if (role := ROLE.get(part)) is None:
        return f"with micro-batches of up to {meter.tokens:,} tokens"
    budget = meter.spec.trainer.lowered_to(meter.token_budget).of(role).token_budget
    return f"with a token budget of {budget:,}"


HeldTensors = Mapping[Part, Sequence[Tensor]]
"""Tensors by part. A tensor in two parts counts for the first one."""


def measured(backend: Backend) -> Ledger:
    """Bytes of what this rank keeps now for policy, reference and critic, on its device and in host memory."""
    held: dict[Part, list[Tensor]] = {part: list(tensors) for part, tensors in backend.held().items()}
    if backend.critic is not None:
        held[Part.CRITIC] = [tensor for tensors in backend.critic.held().values() for tensor in tensors]
    return of_tensors(held, backend.device)


def of_tensors(held: HeldTensors, device: torch.device) -> Ledger:
    """Bytes of the storages of these tensors. A storage counts once. If the device is a CPU, host memory is its
    memory."""
    seen: set[tuple[str, int]] = set()
    on_device, on_host = dict.fromkeys(held, 0.0), dict.fromkeys(held, 0.0)
    for part, tensors in held.items():
        for storage in _storages(tensors):
            key = (storage.device.type, storage.data_ptr())
            if not storage.nbytes() or key in seen:
                continue
            seen.add(key)
            place = on_device if storage.device.type == device.type else on_host
            place[part] += storage.nbytes()
    return Ledger(on_device, {part: size for part, size in on_host.items() if size})


def _storages(tensors: Iterable[Tensor]) -> Iterable[torch.UntypedStorage]:
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        yield local.detach().untyped_storage()
