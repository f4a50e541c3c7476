"""A step as a rank makes it, in one part or in several."""

from collections.abc import Sequence

from millrace.contracts.v1.trainer_pb2 import StepRequest
from millrace.spec import JobSpec
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.commands import ControlThread
from services.trainer.step.result import StepResult
from services.trainer.step.schedule import KlCoefficient
from services.trainer.step.step import Step


def train_step(
    spec: JobSpec,
    backend: Backend,
    request: StepRequest,
    control: ControlThread,
    coefficient: KlCoefficient,
    meter: MemoryMeter,
    sizes: Sequence[int] = (),
) -> StepResult:
    """Makes the step of the request. `sizes`: groups of each of its parts; empty for one part."""
    parts = parts_of(request, sizes)
    step = Step(spec, backend, parts[0], control, coefficient, meter)
    for part in parts:
        step.add(part)
    return step.finish()


def parts_of(request: StepRequest, sizes: Sequence[int]) -> list[StepRequest]:
    """The request cut into parts of so many groups."""
    groups, parts = list(request.groups), []
    for number, size in enumerate(sizes or [len(groups)]):
        part = StepRequest()
        part.CopyFrom(request)
        part.ClearField("groups")
        part.groups.extend(groups[:size])
        part.part, part.step_groups = number, len(request.groups)
        parts.append(part)
        del groups[:size]
    assert not groups
    return parts
