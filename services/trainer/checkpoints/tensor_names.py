"""Which tensors a checkpoint has and a job trains: compared before anything is read."""

import json
from collections.abc import Collection

from millrace.errors import InvalidState
from services.trainer.protocol.adapter import is_adapter
from services.trainer.protocol.backend import Backend, models
from services.trainer.ranks import collectives

WEIGHTS = "model."
"""Prefix of the names of weights in a checkpoint; a critic's have its own prefix before it."""


def trained_names(backend: Backend) -> set[str]:
    """Names in a checkpoint of the weights that the job trains, those of all ranks. A collective."""
    mine = [
        f"{prefix}{name}"
        for prefix, model in models(backend).items()
        for name in model.state()
        if name.startswith(WEIGHTS)
    ]
    return {name for names in collectives.gather_bytes(json.dumps(mine).encode()) for name in json.loads(names)}


def check_names(path: str, trained: set[str], stored: Collection[str]) -> None:
    """Raises InvalidState where the checkpoint at `path` lacks a tensor that the job trains, or has an adapter for a
    layer that has none in the job."""
    lacking = trained - set(stored)
    further = {name for name in stored if name.startswith(WEIGHTS) and is_adapter(name)} - trained
    if further or any(map(is_adapter, lacking)):
        sides = (("the checkpoint alone", _layers(further)), ("this job alone", _layers(lacking)))
        told = "; ".join(f"{side} has one for {_some(layers)}" for side, layers in sides if layers)
        what = f"{path} has adapters for other layers than this job: {told}."
        raise InvalidState(what, "give the job the target_modules and exclude_modules of the job that saved it.")
    if lacking:
        what = f"{path} lacks tensors that this job trains: {_some(lacking)}."
        raise InvalidState(what, "give the folder of a checkpoint that a job with this backend has saved.")


def _layers(names: set[str]) -> set[str]:
    return {name.partition(".lora_")[0].removeprefix(WEIGHTS) for name in names if is_adapter(name)}


def _some(names: set[str]) -> str:
    """One of them, and how many there are besides."""
    return f"{min(names)} and {len(names) - 1} more" if len(names) > 1 else min(names)
