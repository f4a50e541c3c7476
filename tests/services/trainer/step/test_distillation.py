"""Steps towards a teacher: loss and gradient against autograd on a plain model, any packing, and that the KL falls."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from millrace.contracts.trajectories import sampled_spans
from millrace.contracts.v1 import common_pb2
from millrace.contracts.v1.trainer_pb2 import StepRequest
from millrace.errors import InvalidState
from millrace.spec import JobSpec
from millrace.wire.arrays import TokenScores, pack_logprobs, pack_tokens, unpack_tokens
from services.trainer.backends import build
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.commands import ControlThread
from services.trainer.step.schedule import KlCoefficient
from tests.models import random_model
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups, refs
from tests.services.trainer.steps import train_step

pytestmark = pytest.mark.slow
TOP = 5
LOSSES = ("k1", "k3", "forward_kl_topk")
Groups = dict[str, common_pb2.Group]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedCoordinator, ControlThread]]:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    control = ControlThread()
    try:
        with coordinator() as started:
            yield started, control
    finally:
        control.stop()
        dist.destroy_process_group()


def job(
    model: Path,
    loss: str,
    *,
    lr: float = 0.0,
    token_budget: int = 512,
    algorithm: dict[str, Any] | None = None,
    **distillation: Any,
) -> JobSpec:
    distilled = {"pool": "teacher", "loss": loss, "top_k": TOP, **distillation}
    return job_spec(
        model,
        pools=[{"name": "teacher", "path": str(model)}],
        algorithm={**(algorithm or {}), "distillation": distilled},
        trainer={
            "token_budget": token_budget,
            "optimizer": {"lr": lr, "weight_decay": 0.0, "warmup_steps": 0, "clip_grad_norm": 1.0},
        },
    )


def stepped(
    spec: JobSpec, backend: Backend, groups: Groups, served: tuple[ScriptedCoordinator, ControlThread], step: int = 1
) -> dict[str, float]:
    served[0].script.groups = groups
    request = StepRequest(job_id="job-1", step=step, groups=refs(groups), work_address=served[0].address)
    meter = MemoryMeter(spec, backend, rank=0, ranks=1)
    return train_step(spec, backend, request, served[1], KlCoefficient(0.0), meter).metrics


def logprobs(model: Any, group: common_pb2.Group, trajectory: common_pb2.Trajectory) -> tuple[Tensor, Tensor]:
    """Log-probabilities in the places of the sampled tokens, [N, V], and these tokens, [N]: one plain pass."""
    prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens)
    tokens = torch.from_numpy(np.concatenate([prompt, unpack_tokens(trajectory.tokens)]).astype(np.int64))
    places = [len(prompt) + place for span in sampled_spans(trajectory) for place in range(*span)]
    rows = model(tokens[None]).logits[0].float().log_softmax(-1)
    return rows[torch.tensor(places) - 1], tokens[places]


def top_of(loss: str) -> int:
    return TOP if loss == "forward_kl_topk" else 0


@torch.no_grad()
def teach(groups: Groups, teacher: Any, loss: str) -> None:
    """Gives the groups the teacher's scores that the loss reads, as a replica does."""
    for group in groups.values():
        for trajectory in group.trajectories:
            rows, tokens = logprobs(teacher, group, trajectory)
            top = rows.topk(top_of(loss), dim=-1)
            at_tokens = rows.gather(1, tokens[:, None])[:, 0].numpy()
            scores = TokenScores(at_tokens, top.indices.int().numpy(), top.values.numpy())
            trajectory.teacher.CopyFrom(scores.message())


def expected(loss: str, student: Any, groups: Groups) -> Tensor:
    """The mean loss over all sampled tokens, from the formulas."""
    losses = []
    for group in groups.values():
        for trajectory in group.trajectories:
            rows, tokens = logprobs(student, group, trajectory)
            own = rows.gather(1, tokens[:, None])[:, 0]
            told = TokenScores.of(trajectory.teacher, len(tokens), top_of(loss))
            teacher_n = torch.tensor(told.logprobs_n)
            if loss == "k1":
                losses.append((own - own.detach()).exp() * (own - teacher_n).detach())
            elif loss == "k3":
                losses.append((teacher_n - own).exp() - (teacher_n - own) - 1)
            else:
                teacher_nk, student_nk = (
                    torch.tensor(told.top_logprobs_nk),
                    rows.gather(1, torch.tensor(told.top_tokens_nk).long()),
                )
                rest, student_rest = 1 - teacher_nk.exp().sum(-1), 1 - student_nk.exp().sum(-1)
                inner = (teacher_nk.exp() * (teacher_nk - student_nk)).sum(-1)
                losses.append(inner + rest * (rest / student_rest).log())
    return torch.cat(losses).mean()


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula_however_it_is_packed(
    loss: str, tied_model: Path, served: tuple[ScriptedCoordinator, ControlThread]
) -> None:
    """Over plain answers and over episodes whose turns have gaps."""
    student = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    teacher = random_model(tied=True, seed=7)
    backend = build(job(tied_model, loss), torch.device("cpu"))
    for groups in (random_groups(4, 4, seed=2), episode_groups(4, 4, seed=2)):
        teach(groups, teacher, loss)
        student.zero_grad()
        exact = expected(loss, student, groups)
        exact.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in student.parameters() if p.grad is not None))
        for token_budget in (64, 2048):
            metrics = stepped(job(tied_model, loss, token_budget=token_budget), backend, groups, served)
            assert metrics["distillation/loss"] == pytest.approx(exact.item(), rel=1e-4)
            assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
        halved = stepped(job(tied_model, loss, coefficient=0.5), backend, groups, served)
        assert halved["actor/grad_norm"] == pytest.approx(norm / 2, rel=1e-3)
        chosen = job(tied_model, loss, algorithm={"top_entropy_fraction": 0.2})  # of the policy loss alone
        metrics = stepped(chosen, backend, groups, served)
        assert metrics["distillation/loss"] == pytest.approx(exact.item(), rel=1e-4)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_scores_that_do_not_fit_are_refused(
    tied_model: Path, served: tuple[ScriptedCoordinator, ControlThread]
) -> None:
    groups = random_groups(4, 4)
    with pytest.raises(InvalidState, match="cannot be trained: the teacher's scores: 0 scores"):
        stepped(job(tied_model, "k1"), build(job(tied_model, "k1"), torch.device("cpu")), groups, served)


# of the others the gradient is tested above
@pytest.mark.parametrize("loss", [*(pytest.param(loss, marks=pytest.mark.matrix) for loss in LOSSES[:2]), LOSSES[2]])
def test_the_policy_comes_nearer_to_the_teacher(
    loss: str, tied_model: Path, served: tuple[ScriptedCoordinator, ControlThread]
) -> None:
    """On samples of the policy itself, step by step. Without learning rate nothing changes (the other tests)."""
    teacher, student = random_model(tied=True, seed=3), random_model(tied=True, seed=0)
    spec = job(tied_model, loss, lr=5e-3)
    backend = build(spec, torch.device("cpu"))
    prompts = torch.randint(0, 256, (4, 5), generator=torch.Generator().manual_seed(0))
    apart = []
    for step in range(1, 17):
        groups = sampled(backend, student, prompts)
        apart.append(distance(student, teacher, groups))
        teach(groups, teacher, loss)
        stepped(spec, backend, groups, served, step)
    assert np.mean(apart[-2:]) < 0.8 * np.mean(apart[:2]), [round(each, 3) for each in apart]


@torch.no_grad()
def sampled(backend: Backend, student: Qwen3ForCausalLM, prompts: Tensor) -> Groups:
    """Groups of four answers of six tokens by the policy as it is now, which `student` becomes."""
    weights = {info.name: tensor for info, tensor in backend.export("float32") if tensor is not None}
    student.load_state_dict(weights, strict=False)
    tokens = prompts.repeat_interleave(4, dim=0)
    for _ in range(6):
        drawn = torch.multinomial(student(tokens).logits[:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
    rows = student(tokens).logits.log_softmax(-1)[:, 4:-1].gather(2, tokens[:, 5:, None])[..., 0]
    groups = {}
    for number, prompt in enumerate(prompts):
        group = common_pb2.Group(job_id="job-1", prompt_id=f"0-{number}", purpose=common_pb2.PURPOSE_TRAIN)
        group.prompt_tokens = pack_tokens(prompt.tolist())
        for row in range(4 * number, 4 * number + 4):
            group.trajectories.add(
                tokens=pack_tokens(tokens[row, 5:].tolist()),
                logprobs=pack_logprobs(rows[row].tolist()),
                versions=[common_pb2.VersionSpan(version=0, start=0, end=6)],
                stop_reason=common_pb2.STOP_REASON_LENGTH,
                reward=0.0,
            )
        groups[group.prompt_id] = group
    return groups


@torch.no_grad()
def distance(student: Any, teacher: Any, groups: Groups) -> float:
    """KL(π‖p) in the places of the groups, nats a token, exact."""
    found = []
    for group in groups.values():
        for trajectory in group.trajectories:
            own, _ = logprobs(student, group, trajectory)
            other, _ = logprobs(teacher, group, trajectory)
            found.append((own.exp() * (own - other)).sum(-1))
    return float(torch.cat(found).mean())
