"""Two updates on the same batch by any backend and topology, with files that the caller compares."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.megatron import batches
from benchmarks.shapes import trainer_spec
from millrace.spec import JobSpec
from services.trainer.backends import build
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.world import World


def job_spec(case: dict[str, Any]) -> JobSpec:
    return trainer_spec(
        Path(case["model"]),
        backend=case.get("backend", "megatron"),
        backend_options=case.get("options", {}),
        dtype=case["dtype"],
        token_budget=1 << 20,
        optimizer=batches.OPTIMIZER,
    )


def trained(world: World, case: dict[str, Any]) -> dict[str, Any]:
    backend = build(job_spec(case), world.device)
    parallel = backend.data_parallel
    replayed = case.get("replayed", False)
    mine = batches.compared(parallel.rank, parallel.size, case["vocabulary"], case["longest"], replayed=replayed)
    before = backend.logprobs(mine, temperature=batches.TEMPERATURE)
    found = _by_row(backend, mine, before)
    losses, norms = [], []
    for _ in range(2):
        outputs = backend.forward_backward(mine, batches.loss_fn, temperature=batches.TEMPERATURE)
        norm = backend.gradient_norm()
        backend.optimizer_step(lr=batches.OPTIMIZER["lr"], gradient_scale=min(1.0, batches.CLIP_NORM / (norm + 1e-6)))  # type: ignore[arg-type]
        losses.append(_total(backend, sum(outputs)))
        norms.append(norm)
    weights = {info.name: tensor.cpu() for info, tensor in backend.export("float32") if tensor is not None}
    if world.rank == 0:
        _write(Path(case["file"]), found, weights)
    return {"losses": losses, "norms": norms, **backend.metrics()}


def plain(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Trains the Hugging Face model in float32 with torch's AdamW, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    device = world.device
    model: Any = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    model.to(device)
    routing = GivenExperts(model) if case.get("replayed") else None
    optimizer = torch.optim.AdamW(model.parameters(), **batches.OPTIMIZER)  # type: ignore[arg-type]
    losses: list[float] = []
    norms: list[float] = []
    logprobs: list[np.ndarray] = []
    for step in range(2):
        optimizer.zero_grad()
        total = 0.0
        for row in range(batches.ROWS):
            if routing is not None:
                routing.row = row
            scores = _scores(model, row, case, device)
            loss = batches.loss_of(*scores, (row,), (len(scores[0]),))
            loss.backward()
            total += float(loss.detach())
            if step == 0:
                logprobs.append(scores[0].detach().cpu().numpy())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), batches.CLIP_NORM)))
        optimizer.step()
        losses.append(total)
    file = Path(case["file"])
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file.with_suffix(".npy"), np.concatenate(logprobs))
    model.save_pretrained(file.with_suffix(""))
    return {"losses": losses, "norms": norms}


class GivenExperts:
    """Makes the routers of a Qwen3-MoE send the tokens of `row` to the experts that `batches.experts_of` gives."""

    row = 0

    def __init__(self, model: Any) -> None:
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._send, layer))

    def _send(self, layer: int, router: object, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> object:
        logits_te = outputs[0]
        chosen_tk = batches.experts_of(len(logits_te), 4, 8, 2, self.row)[:, layer].to(logits_te.device)
        return logits_te, logits_te.gather(1, chosen_tk).softmax(-1), chosen_tk


def deepep(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Which dispatcher is taken, and what is said where DeepEP is not available."""
    from millrace.backends.megatron import Experts, MegatronOptions, deepep_obstacle
    from millrace.errors import InvalidJob
    from services.trainer.backends.megatron.model.configuration import dispatcher
    from services.trainer.ranks.world import hosts_of_ranks

    hosts = hosts_of_ranks()
    taken = dispatcher(MegatronOptions(expert_parallel=2), hosts)
    try:
        demanded = dispatcher(MegatronOptions(expert_parallel=2, experts=Experts(dispatcher="deepep")), hosts)
    except InvalidJob as error:
        demanded = str(error)
    return {"obstacle": deepep_obstacle(), "auto": taken, "demanded": demanded}


def _scores(model: Any, row: int, case: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    ids, prompt = batches.tokens_of(row, case["vocabulary"], case["longest"])
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    log_p = (model(tokens[None]).logits[0, prompt - 1 : -1].float() / batches.TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, tokens[prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _by_row(backend: Backend, mine: list[Any], values: list[Tensor]) -> np.ndarray:
    """The values of all response tokens of the whole batch, row after row."""
    found: dict[int, list[float]] = {}
    for microbatch, values_r in zip(mine, values, strict=True):
        parts = values_r.cpu().split(microbatch.sampled_lengths)
        found |= {row: part.tolist() for row, part in zip(microbatch.rows, parts, strict=True)}
    everyone: list[Any] = [found]
    if backend.data_parallel.group is not None:
        everyone = [None] * backend.data_parallel.size
        dist.all_gather_object(everyone, found, group=backend.data_parallel.group)
    whole = {row: part for ranks in everyone for row, part in ranks.items()}
    return np.array([value for row in sorted(whole) for value in whole[row]], dtype=np.float32)


def _total(backend: Backend, value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=backend.device)
    if backend.data_parallel.group is not None:
        dist.all_reduce(total, group=backend.data_parallel.group)
    return float(total)


def _write(file: Path, logprobs: np.ndarray, weights: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file.with_suffix(".npy"), logprobs)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
