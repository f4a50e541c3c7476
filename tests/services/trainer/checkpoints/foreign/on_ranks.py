"""What runs on two ranks: Megatron-Core and FSDP2 write checkpoints with their own functions, both backends start from
them, and what is exported is loaded with those functions."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backends import build
from services.trainer.checkpoints.exported import Form
from services.trainer.checkpoints.exported import write as export
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.world import World
from tests.services.trainer.backends.megatron import batch
from tests.services.trainer.backends.megatron.on_ranks import Case, _by_row, _changed, job_spec
from tests.services.trainer.checkpoints.saved import save

APART = {"singleton_local_shards": True}
"""Megatron's way to store each layer, expert and projection by itself."""


def write(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, list[float]]:
    """Writes a checkpoint of each case with the library that trains it, to the folder in `to`; Megatron to two, in both
    of its forms. Returns the log-probabilities of the model that wrote it."""
    return {name: _written(world, case) for name, case in cases.items()}


def _written(world: World, case: Case) -> list[float]:
    backend: Any = build(job_spec(case), world.device)
    if case.get("backend") == "fsdp2":
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": backend._model.state_dict()}, checkpoint_id=case["to"][0])
        return _logprobs(backend)
    from megatron.core import dist_checkpointing

    for target, metadata in zip(case["to"], ({}, APART), strict=True):
        if world.rank == 0:
            Path(target).mkdir(parents=True)
        dist.barrier()
        tensors: dict[str, Any] = {}
        for chunk in backend._chunks:
            tensors |= _sharded(chunk, metadata)
        dist_checkpointing.save(tensors, target)
    return _logprobs(backend)


def read(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Starts each case. Returns the names of tensors that are not those of the folder `truth`, bit for bit, and the
    log-probabilities."""
    answers = {}
    for name, case in cases.items():
        spec = job_spec(case)
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"weights": case["weights"]})})
        backend = build(spec, world.device)
        changed = _changed(backend, Path(case["truth"]), "float32")
        answers[name] = {"changed": changed, "logprobs": _logprobs(backend)}
    return answers


def exported(world: World, folder: Path, cases: dict[str, Case]) -> dict[str, list[str]]:
    """Exports a checkpoint of each case to `to`, and has Megatron-Core or torch load it into a model of zeros. Returns
    the names of tensors that are not those of the model folder then, bit for bit."""
    return {name: _exported(world, case) for name, case in cases.items()}


def _exported(world: World, case: Case) -> list[str]:
    backend: Any = build(job_spec(case), world.device)
    model, target = Path(case["model"]), Path(case["to"])
    save(target / "saved", backend, 1)
    megatron = case["backend"] == "megatron"
    if world.rank == 0:
        form: Form = "megatron" if megatron else "dcp"
        export(target / "saved", target / "exported", model, form=form)
    dist.barrier()
    with torch.no_grad():
        (_load_with_megatron if megatron else _load_with_torch)(backend, target / "exported")
    return _changed(backend, model, "float32")


def _load_with_megatron(backend: Any, checkpoint: Path) -> None:
    from megatron.core import dist_checkpointing

    (chunk,) = backend._chunks
    for tensor in chunk.parameters():
        tensor.zero_()
    for name, tensor in chunk.named_buffers():
        if name.endswith("expert_bias"):
            tensor.zero_()
    loaded = dist_checkpointing.load(_sharded(chunk, {}), str(checkpoint))
    chunk.load_state_dict(loaded)


def _sharded(chunk: Any, metadata: dict[str, Any]) -> Any:
    """Megatron's description of the chunk. Where all layers have experts, the config says so as Megatron-LM's does:
    Megatron stacks such layers."""
    frequency = chunk.decoder.config.moe_layer_freq
    if isinstance(frequency, list) and all(frequency):
        chunk.decoder.config.moe_layer_freq = 1
    return chunk.sharded_state_dict(metadata=dict(metadata))  # Megatron writes into it


def _load_with_torch(backend: Any, checkpoint: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = backend._model.state_dict()
    for tensor in state.values():
        tensor.zero_()
    dcp.load(state, checkpoint_id=checkpoint)


def _logprobs(backend: Backend) -> list[float]:
    parallel = backend.data_parallel
    batches = batch.microbatches(parallel.rank, parallel.size, 1)
    return _by_row(backend, batches, backend.logprobs(batches, temperature=batch.TEMPERATURE))


def main() -> None:
    folder, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    world = World.join()
    answers = {name: globals()[name](world, folder, **arguments) for name, arguments in calls.items()}
    if world.rank == 0:
        (folder / "answer.json").write_text(json.dumps(answers))
    dist.barrier()
    for child in multiprocessing.active_children():  # Megatron's writer keeps one
        child.kill()
    os._exit(0)  # without Python's teardown: process groups that are still open would complain


if __name__ == "__main__":
    main()
