"""What a step tells the coordinator besides metrics, against plain PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.telemetry.metrics.histograms import ADVANTAGES, IMPORTANCE_RATIOS
from millrace.wire.arrays import unpack_logprobs
from millrace.wire.v1 import common_pb2
from millrace.wire.v1 import trainer_pb2 as pb
from services.trainer.backends import build
from services.trainer.memory.meter import MemoryMeter
from services.trainer.ranks.event_loop import ControlThread
from services.trainer.service.worker import _response
from services.trainer.step.kl import KlCoefficient
from services.trainer.step.step import StepResult, train_step
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups, refs
from tests.services.trainer.step.plain_grpo import Plain, numbered

Groups = dict[str, common_pb2.Group]


def step_of(
    spec: JobSpec, groups: Groups, device: torch.device, control: ControlThread, served: ScriptedCoordinator
) -> StepResult:
    served.script.groups = groups
    backend = build(spec, device)
    request = pb.StepRequest(job_id="job-1", step=1, groups=refs(groups), work_address=served.address)
    return train_step(spec, backend, request, control, KlCoefficient(0.0), MemoryMeter(spec, backend, 0, 1))


@torch.no_grad()
def expected(folder: Path, spec: JobSpec, groups: Groups) -> list[tuple[Tensor, Tensor, float]]:
    """Of each trajectory the log-probabilities of its sampled tokens under the model, those of the engine, and its
    advantage."""
    plain = Plain(folder, spec)
    rows = numbered(list(groups.values()))
    tokens_bt, prompts_b, mask_bt = plain._padded(list(groups.values()), rows)
    logprobs_bt = plain._logprobs(plain.model, tokens_bt, prompts_b, mask_bt)[0]
    advantages_b = plain._advantages(rows, logprobs_bt, logprobs_bt, mask_bt)
    engine = [torch.from_numpy(unpack_logprobs(trajectory.logprobs).copy()) for _, _, trajectory in rows]
    own = (logprobs_bt[row][mask_bt[row]] for row in range(len(rows)))
    return list(zip(own, engine, advantages_b.tolist(), strict=True))


@pytest.mark.parametrize("make", [random_groups, episode_groups])
def test_histograms(
    make: Callable[..., Groups],
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
) -> None:
    spec, groups = job_spec(untied_model), make(4, 4, seed=1)
    result = step_of(spec, groups, one_rank, control, served)
    rows = expected(untied_model, spec, groups)
    ratios = np.concatenate([(own.double() - engine.double()).exp().numpy() for own, engine, _ in rows])
    assert result.histograms[IMPORTANCE_RATIOS.key] == IMPORTANCE_RATIOS.of(ratios)
    found = result.histograms[ADVANTAGES.key]
    advantages = [advantage for own, _, advantage in rows for _ in own]
    assert sum(found.counts) == len(advantages)
    assert (found.edges[0], found.edges[-1]) == pytest.approx((min(advantages), max(advantages)), rel=1e-4)


def test_only_rank_0_answers_what_is_large(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, untied_model: Path
) -> None:
    result = step_of(job_spec(untied_model), random_groups(2, 2), one_rank, control, served)
    first, second = (_response(Version(1), result, rank) for rank in (0, 1))
    assert set(first.histograms) == set(result.histograms) and not second.histograms
    assert first.metrics == second.metrics
