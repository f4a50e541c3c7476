"""What runs on two ranks: Megatron-Core and FSDP2 write checkpoints with their own functions, and both backends start
from them."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backends import build
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.world import World
from tests.services.trainer.backends.megatron import batch
from tests.services.trainer.backends.megatron.on_ranks import Case, _by_row, _changed, job_spec

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
            tensors |= chunk.sharded_state_dict(metadata=dict(metadata))  # Megatron writes into it
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
    os._exit(0)  # without Python's teardown: process groups that are still open would complain


if __name__ == "__main__":
    main()
