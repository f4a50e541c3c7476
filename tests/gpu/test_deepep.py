"""DeepEP computes what all-to-all computes, within rounding: one layer of experts on two ranks of one GPU, through the
functions that Megatron-Core calls, and on two GPUs whole updates of a model with experts.
"""

import json
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.backends.megatron import deepep_obstacle
from millrace.local.ports import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(700),
    pytest.mark.skipif(deepep_obstacle() is not None, reason=f"needs DeepEP: {deepep_obstacle()}"),
]
ROOT = Path(__file__).parents[2]
RANKS, TOKENS, HIDDEN, EXPERTS, CHOICES = 2, 512, 512, 8, 2
ANSWERS_S = 240.0


def layer_inputs(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [T, H], the experts of each token [T, K], their weights [T, K], all experts' matrices [E, H, H],
    and what the output should be [T, H]. The matrices are the same on every rank."""
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=shared) / HIDDEN**0.5
    hidden, target = (torch.randn(TOKENS, HIDDEN, generator=own) for _ in range(2))
    scores, experts = torch.randn(TOKENS, EXPERTS, generator=own).softmax(-1).topk(CHOICES)
    on_gpu = [each.bfloat16().cuda() for each in (hidden, matrices, target)]
    return on_gpu[0].requires_grad_(), experts.cuda(), scores.cuda().requires_grad_(), on_gpu[1], on_gpu[2]


def chosen(hidden: Tensor, experts: Tensor, weights: Tensor, matrices: Tensor, first: int) -> Tensor:
    """[T, H] the weighted sum of the outputs of experts first, first + 1, …; `experts` counts from `first`."""
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in range(len(matrices)):
        weight_t = (weights * (experts == expert + first)).sum(-1, keepdim=True)
        total = total + weight_t * (hidden @ matrices[expert]).float()
    return total


def compare(rank: int, port: int, answer: Connection) -> None:
    """One rank: answers the loss and the gradients' distances between DeepEP and all experts computed here."""
    from megatron.core.transformer.moe.fused_a2a import fused_combine, fused_dispatch

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    found: dict[str, dict[str, Tensor]] = {}
    for way in ("deepep", "plain"):
        hidden, experts, weights, matrices, target = layer_inputs(rank)
        if way == "plain":
            output = chosen(hidden, experts, weights, matrices, 0)
        else:
            mine = EXPERTS // RANKS
            got, local, scores, _, handle = fused_dispatch(hidden, experts, weights, EXPERTS, dist.group.WORLD)
            part = chosen(got, local, scores, matrices[rank * mine : (rank + 1) * mine], 0)
            output = fused_combine(part.bfloat16(), dist.group.WORLD, handle)[0].float()
        loss = (output - target.float()).square().mean()
        loss.backward()
        assert hidden.grad is not None and weights.grad is not None
        found[way] = {"loss": loss.detach(), "output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
    torch.cuda.synchronize()
    apart = {
        name: float((found["deepep"][name].double() - plain.double()).norm() / plain.double().norm())
        for name, plain in found["plain"].items()
    }
    answer.send(apart)
    dist.barrier()
    dist.destroy_process_group()


def test_a_layer_on_two_ranks_of_one_gpu() -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    started = [context.Process(target=compare, args=(rank, port, pipes[rank][1])) for rank in range(RANKS)]
    for process in started:
        process.start()
    try:
        for pipe, _ in pipes:
            assert pipe.poll(ANSWERS_S), "a rank gave no answer"
            apart = pipe.recv()
            # bfloat16 has 8 bits: each of the few roundings moves an element by at most 0.4 %.
            assert apart["output"] < 0.01 and apart["hidden"] < 0.01 and apart["weights"] < 0.01, apart
            assert apart["loss"] < 0.02, apart
    finally:
        for process in started:
            process.join(20)
            process.kill()


@pytest.mark.gpu(2)
def test_updates_are_those_of_all_to_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.megatron", "--out", str(tmp_path), "--parts", "deepep"]
    command += ["--only", "replayed", "--budget-s", "300"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=400)
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    ran = {case["name"]: case for launch in results["launches"].values() for case in launch}
    assert {name: case["error"] for name, case in ran.items() if not case["ok"]} == {}
    deepep, alltoall = ran["replayed EP2, deepep"], ran["replayed EP2, alltoall"]
    assert deepep["losses"] == pytest.approx(alltoall["losses"], rel=0.002)
    assert deepep["norms"] == pytest.approx(alltoall["norms"], rel=0.01)
    for name in ("replayed EP2, deepep", "replayed EP2, alltoall"):
        assert results["equal"][name]["logprobs_mean_vs_huggingface"] < 0.03, name
        assert results["equal"][name]["weights_vs_huggingface"] < 0.06, name
