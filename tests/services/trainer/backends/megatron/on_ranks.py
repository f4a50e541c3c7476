"""What runs on the ranks that `launch` starts."""

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.errors import InvalidJob
from millrace.memory.ledger import Part
from millrace.spec import JobSpec, parse
from millrace.weights.folder_tensors import INNER, SINGLE
from millrace.weights.plans.manifest import Content
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint
from services.trainer.memory.exhausted import free_unreachable
from services.trainer.memory.meter import measured
from services.trainer.protocol.backend import Backend
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks.world import World
from tests.services.trainer.backends.megatron import batch
from tests.services.trainer.checkpoints.saved import prepare, write_adapter

Case = dict[str, Any]
"""What a test asks for: `model` (a folder), `options`, and more that each function names."""


def job_spec(case: Case) -> JobSpec:
    return parse(
        {
            "name": "test",
            "output": "/unused",
            "model": {"path": case["model"], "lora": case.get("lora")},
            "data": {"procedural": "reasoning_gym:spell_backward", "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 64},
            "algorithm": {"kl": {"name": "k3"}} if case.get("reference") else {},
            "trainer": {
                "backend": case.get("backend", "megatron"),
                "backend_options": case.get("options", {}),
                "dtype": case.get("dtype", "float32"),
                "token_budget": 256,
                "optimizer": batch.OPTIMIZER,
            },
        }
    )


def train(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Each case: `steps` updates (2) on the batch, the log-probabilities before, and the weights after, in a file."""
    return {name: _trained(world, folder / f"{name}.safetensors", case) for name, case in cases.items()}


def passes(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Each case: the log-probabilities of this rank's part of one packed batch, with short sequences beside long ones.
    The gradients of its loss go to a file, under the names of the model's tensors. And the bytes of the weights."""
    return {name: _passed(world, folder / f"{name}.safetensors", case) for name, case in cases.items()}


def _passed(world: World, file: Path, case: Case) -> dict[str, Any]:
    from tests.services.trainer.backends.fsdp2.test_recurrent import LENGTHS, loss, samples

    backend: Any = build(job_spec(case), world.device)
    drawn, parallel = samples(LENGTHS), backend.data_parallel
    batches = [MicroBatch.pack(drawn, range(parallel.rank, len(drawn), parallel.size))]
    (logprobs,) = backend.forward_backward(batches, loss, temperature=1.0)
    gradients = [
        {name: parameter.main_grad for name, parameter in chunk.named_parameters()} for chunk in backend._chunks
    ]
    whole = {info.name: tensor for info, tensor in backend._gather_plan.export(gradients, "float32", world.device)}
    if world.rank == 0:
        save_file(whole, file)
    backend.abandon_pass()
    return {"logprobs": logprobs.tolist(), "weights": measured(backend).device[Part.WEIGHTS]}


def images(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Each case: the log-probabilities of sequences with images, by row, of policy and reference, and a file of the
    gradients. With `lora` three updates come before, from the adapter in NAME/start to the one in NAME/saved, and the
    file has the merged weights. Of each rank the bytes of its weights and the FLOPs of its tower. And the reference's
    log-probabilities if layers add no features."""
    return {name: _seen(world, folder / f"{name}.safetensors", case) for name, case in cases.items()}


def _seen(world: World, file: Path, case: Case) -> dict[str, Any]:
    from tests.services.trainer.backends.fsdp2.test_images import drawn
    from tests.services.trainer.backends.fsdp2.test_recurrent import loss

    backend: Any = build(image_job(case), world.device)
    samples, parallel = drawn(Path(case["model"])), backend.data_parallel
    # The second of two data-parallel ranks has no image.
    mine = [[0, 2], [1, 3]] if parallel.size == 1 else [[2]] if parallel.rank else [[0, 1, 3]]
    batches = [MicroBatch.pack(samples, rows) for rows in mine]
    if backend.adapter is not None:
        write_adapter(file.with_suffix("") / "start", backend.adapter, Path(case["model"]))
        for _ in range(3):
            backend.forward_backward(batches, loss, temperature=1.0)
            backend.optimizer_step(lr=5e-3, gradient_scale=1.0)
        write_adapter(file.with_suffix("") / "saved", backend.adapter, Path(case["model"]))
        _write(backend, file, "float32")
        logprobs = backend.logprobs(batches, temperature=1.0)
    else:
        logprobs = backend.forward_backward(batches, loss, temperature=1.0)
        gradients = [{name: p.main_grad for name, p in chunk.named_parameters()} for chunk in backend._chunks]
        whole = {info.name: each for info, each in backend._gather_plan.export(gradients, "float32", world.device)}
        if world.rank == 0:
            save_file(whole, file)
        backend.abandon_pass()
    reference = backend.logprobs(batches, temperature=1.0, reference=True)
    held = {"weights": measured(backend).device[Part.WEIGHTS], "flops": backend.tower_flops}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    if (tower := backend._tower) is not None:
        tower.features = lambda batch, whole=tower.features: whole(batch)[:1]
    without = backend.logprobs(batches, temperature=1.0, reference=True)
    found = {"logprobs": logprobs, "reference": reference, "without": without}
    return {**{name: _by_row(backend, batches, each) for name, each in found.items()}, "held": everyone}


def image_job(case: Case) -> JobSpec:
    from tests.services.trainer.backends.fsdp2.test_images import DATA
    from tests.services.trainer.groups import job_spec

    trainer = {"token_budget": 2048, "backend": "megatron", "backend_options": case["options"]}
    spoken = {"data": DATA, "algorithm": {"kl": {"name": "k3"}}, "trainer": trainer}
    return job_spec(Path(case["model"]), model={"lora": case.get("lora")}, **spoken)


def refused(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, str]:
    """What is wrong with each case."""
    found = {}
    for name, case in cases.items():
        try:
            build(job_spec(case), world.device)
        except InvalidJob as error:
            found[name] = error.what
    return found


def left_behind(world: World, folder: Path) -> dict[str, int]:
    """Parameters of models that were trained before, and process groups beside those of the last: both should be
    gone."""
    from megatron.core import parallel_state

    free_unreachable(world.device)
    known = {id(group) for group in parallel_state._global_process_group_list}
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return {
        "parameters": sum(type(found) is Parameter for found in gc.get_objects()),
        "groups": sum(id(group) not in known for group in groups),
    }


def against_mbridge(world: World, folder: Path, models: dict[str, str]) -> dict[str, Any]:
    """Each kind of model, whole and split over two ranks."""
    from services.trainer.backends.megatron.cpu import patch_megatron

    patch_megatron()
    from tests.services.trainer.backends.megatron.oracle import BRIDGES, disagreements

    return {f"{kind} TP{size}": disagreements(kind, Path(models[kind]), size) for kind in BRIDGES for size in (1, 2)}


def head(world: World, folder: Path) -> dict[str, Any]:
    """Scores and gradients against autograd in float64, and the largest tensor on the way."""
    from services.trainer.backends.head import VocabularyPart, WantedTokens, scores

    tokens, vocabulary, hidden, chunk, temperature = 500, 3000, 16, 32, 0.6
    random = torch.Generator().manual_seed(0)
    hidden_rh = torch.randn(tokens, hidden, generator=random, requires_grad=True)
    weight_vh = torch.randn(vocabulary + 72, hidden, generator=random, requires_grad=True)  # padded
    targets_r = torch.randint(0, vocabulary, (tokens,), generator=random)
    upstream_2r = torch.randn(2, tokens, generator=random)
    wanted = WantedTokens(torch.arange(tokens), targets_r, temperature)
    with LargestTensor() as watched:
        found_2r = scores(hidden_rh, weight_vh, wanted, VocabularyPart(0, vocabulary, None), chunk)
        found = torch.autograd.grad(found_2r, (hidden_rh, weight_vh), upstream_2r)
    exact_rh, exact_vh = (t.detach().double().requires_grad_() for t in (hidden_rh, weight_vh))
    log_p = (exact_rh @ exact_vh[:vocabulary].t() / temperature).log_softmax(-1)
    exact_2r = torch.stack([log_p.gather(1, targets_r[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
    exact = torch.autograd.grad(exact_2r, (exact_rh, exact_vh), upstream_2r.double())
    pairs = zip((found_2r, *found), (exact_2r, *exact), strict=True)
    return {
        "differences": [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs],
        "largest": watched.numel,
        "allowed": max(chunk * vocabulary, weight_vh.numel()),
        "whole": tokens * vocabulary,
    }


class LargestTensor(TorchDispatchMode):
    """Remembers how large the largest tensor is that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def context_parallel_packing(world: World, folder: Path) -> dict[str, Any]:
    """Two ranks' packs of one micro-batch, as they would be with Transformer Engine, put together again."""
    whole = batch.packed([0, 1, 2, 3, 4])
    gaps = replace(
        whole,
        sampled_lengths=tuple(len(batch.sampled_of(row)) for row in whole.rows),
        sampled_r=torch.cat([whole.starts[row] + batch.sampled_of(row) for row in whole.rows]),
    )
    return {**_packed_by_two(whole), "gaps": _packed_by_two(gaps)}


def _packed_by_two(whole: MicroBatch) -> dict[str, Any]:
    from services.trainer.backends.megatron.packing import pack

    device = torch.device("cpu")
    parts = [pack(whole, multiple=2, context_rank=rank, context_size=2, device=device) for rank in (0, 1)]
    order_r = parts[0].order_r
    assert order_r is not None
    before_r = torch.cat([part.tokens_p[part.positions_r] for part in parts])[order_r]
    targets_r = torch.cat([part.targets_r for part in parts])[order_r]
    return {
        "predicting": before_r.tolist() == whole.tokens_p[whole.predicting_r].tolist(),
        "targets": targets_r.tolist() == whole.targets_r.tolist(),
        "tokens": [len(part.tokens_p) for part in parts],
        "padded_lengths": parts[0].parameters.cu_seqlens_q.diff().tolist(),
        "counts": [list(part.counts) for part in parts],
        "sampled": len(whole.predicting_r),
    }


def _trained(world: World, file: Path, case: Case) -> dict[str, Any]:
    backend = build(job_spec(case), world.device)
    if "resume" in case:
        checkpoint.load(case["resume"], backend)
    parallel = backend.data_parallel
    options = case.get("options", {})
    # A pipeline is full with four. The loss that balances experts is a mean over micro-batches.
    count = 4 if {"pipeline_parallel", "experts"} & set(options) else 2
    batches = batch.microbatches(parallel.rank, parallel.size, count, told=case.get("told", False))
    before = backend.scores(batches, temperature=batch.TEMPERATURE)
    logprobs = _by_row(backend, batches, [scores.logprobs_r for scores in before])
    entropies = _by_row(backend, batches, [scores.entropy_r for scores in before])
    answer: dict[str, Any] = {"logprobs": logprobs, "entropies": entropies, "losses": [], "norms": []}
    if case.get("break_off"):
        for more in (False, True):
            backend.forward_backward(batches, batch.loss_fn, temperature=batch.TEMPERATURE, more=more)
            backend.zero_gradients()
    if "resume" not in case:
        answer["changed"] = _changed(backend, Path(case["model"]), case.get("export", "float32"))
    frozen = _frozen(backend)
    begun: list[checkpoint.PendingCheckpoint] = []
    for step in range(case.get("steps", 2)):
        loss, norm = _update(backend, batches)
        answer["losses"].append(loss)
        answer["norms"].append(norm)
        if case.get("save_after") == step + 1:
            begun.append(prepare(Path(case["save"]), backend, step + 1, Path(case["model"])))
    for saved in begun:  # after more updates: what is written is a copy
        checkpoint.write_now(saved)
    if case.get("reference"):
        kept = backend.logprobs(batches, temperature=batch.TEMPERATURE, reference=True)
        answer["reference"] = _by_row(backend, batches, kept)
    answer["resident"] = _resident(backend)
    if backend.adapter is not None:
        write_adapter(file.with_suffix(""), backend.adapter, Path(case["model"]))
        answer["frozen"] = all(
            torch.equal(before, after) for before, after in zip(frozen, _frozen(backend), strict=True)
        )
        answer["parts"] = _parts(world, backend, file)
        answer["after"] = _by_row(backend, batches, backend.logprobs(batches, temperature=batch.TEMPERATURE))
    answer["memory"] = backend.metrics()
    answer["parameters"] = backend.parameters
    answer["updates"] = backend.updates
    _write(backend, file, case.get("export", "float32"))
    return answer


def _frozen(backend: Any) -> list[Tensor]:
    """Copies of the parameters that this rank has and does not train; none of a job that trains all weights."""
    chunks = [] if backend.adapter is None else getattr(backend, "_chunks", [])
    return [parameter.clone() for chunk in chunks for parameter in chunk.parameters() if not parameter.requires_grad]


def _resident(backend: Any) -> int:
    """Bytes of memory that the parameters have."""
    storages = [t.untyped_storage() for chunk in getattr(backend, "_chunks", []) for t in chunk.parameters()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _parts(world: World, backend: Any, file: Path) -> list[str]:
    """Names of tensors of base and adapter of which some rank's boxes are not what is exported. The exported adapter is
    written to a file."""
    wrong: set[str] = set()
    for content, part in backend.adapter.parts.items():
        exported = part.export("float32")
        whole: list[Any] = [{info.name: tensor.cpu() for info, tensor in exported if tensor is not None}]
        if world.rank == 0 and content is Content.ADAPTER:
            save_file(whole[0], file.with_suffix(".adapter"))
        dist.broadcast_object_list(whole, 0)
        memory = part.shards("float32")
        boxes, layout = memory.layout.boxes, memory.layout
        for row in range(len(boxes)):
            tensor = memory.manifest.tensors[boxes.tensor[row]]
            dims = len(tensor.shape)
            first, extent, strides = (v[row, :dims].tolist() for v in (boxes.offset, boxes.extent, layout.strides))
            buffer = memory.buffers[layout.buffer[row]]
            held = torch.as_strided(buffer, extent, strides, buffer.storage_offset() + int(layout.start[row])).cpu()
            expected = whole[0][tensor.name][tuple(slice(a, a + n) for a, n in zip(first, extent, strict=True))]
            wrong |= set() if torch.equal(held.float(), expected) else {tensor.name}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return sorted(set().union(*everyone))


def _update(backend: Backend, batches: list[Any]) -> tuple[float, float]:
    """The batch's loss and its gradient's norm."""
    outputs = backend.forward_backward(batches, batch.loss_fn, temperature=batch.TEMPERATURE)
    norm = backend.gradient_norm()
    scale = min(1.0, batch.CLIP_NORM / (norm + 1e-6))
    backend.optimizer_step(lr=batch.LEARNING_RATE, gradient_scale=scale)
    return _total(backend, sum(outputs)), norm


def _changed(backend: Backend, model: Path, dtype: str) -> list[str]:
    """Names of tensors that are not exported, bit for bit, as the model folder has them."""
    whole = {info.name: tensor.cpu() for info, tensor in backend.export(dtype) if tensor is not None}
    if dist.get_rank() != 0:
        return []
    in_folder = {name.replace(f"model.{INNER}", "model."): t for name, t in load_file(model / SINGLE).items()}
    stored = {name: t.to(whole[name].dtype) for name, t in in_folder.items() if name in whole}
    missing = set(whole) - set(stored)
    return sorted(missing | {name for name, t in stored.items() if not torch.equal(t, whole[name])})


def _by_row(backend: Backend, batches: list[Any], values: Sequence[Tensor | None]) -> list[float]:
    """Values of every response token of the whole batch, row after row, on every rank."""
    found: dict[int, list[float]] = {}
    for microbatch, values_r in zip(batches, values, strict=True):
        assert values_r is not None
        parts = values_r.split(microbatch.sampled_lengths)
        found |= {row: part.tolist() for row, part in zip(microbatch.rows, parts, strict=True)}
    everyone: list[Any] = [found]
    if backend.data_parallel.group is not None:
        everyone = [None] * backend.data_parallel.size
        dist.all_gather_object(everyone, found, group=backend.data_parallel.group)
    whole = {row: part for ranks in everyone for row, part in ranks.items()}
    return [value for row in sorted(whole) for value in whole[row]]


def _total(backend: Backend, value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    if backend.data_parallel.group is not None:
        dist.all_reduce(total, group=backend.data_parallel.group)
    return float(total)


def _write(backend: Backend, file: Path, dtype: str) -> None:
    whole = {info.name: tensor for info, tensor in backend.export(dtype)}
    told = {tensor.name: (tensor.shape, tensor.dtype) for tensor in backend.manifest(dtype).tensors}
    if dist.get_rank() == 0:
        assert told == {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in whole.items()}
        save_file(whole, file)


def main() -> None:
    folder, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    world = World.join()
    answers = {name: globals()[name](world, folder, **arguments) for name, arguments in calls.items()}
    if world.rank == 0:
        (folder / "answer.json").write_text(json.dumps(answers))
    dist.barrier()
    # Without Python's teardown: process groups that are still open would complain.
    os._exit(0)


if __name__ == "__main__":
    main()
