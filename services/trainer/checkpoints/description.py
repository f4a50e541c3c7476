"""What a checkpoint is of: its file `trainer.json`, and its tensors compared with those that a job trains, before
anything is read."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from millrace.errors import InvalidState
from millrace.ids import JobId, Version
from services.trainer.checkpoints import FILE, FORMAT
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
    """Raises InvalidState if the checkpoint at `path` lacks a tensor that the job trains, or has an adapter for a
    layer that has none in the job."""
    lacking = trained - set(stored)
    further = {name for name in stored if name.startswith(WEIGHTS) and is_adapter(name)} - trained
    if further or any(map(is_adapter, lacking)):
        sides = (("the checkpoint alone", _layers(further)), ("this job alone", _layers(lacking)))
        differences = "; ".join(f"{side} has one for {_some(layers)}" for side, layers in sides if layers)
        what = f"{path} has adapters for other layers than this job: {differences}."
        raise InvalidState(what, "give the job the target_modules and exclude_modules of the job that saved it.")
    if lacking:
        what = f"{path} lacks tensors that this job trains: {_some(lacking)}."
        raise InvalidState(what, "give the folder of a checkpoint that a job with this backend has saved.")


def _layers(names: set[str]) -> set[str]:
    return {name.partition(".lora_")[0].removeprefix(WEIGHTS) for name in names if is_adapter(name)}


def _some(names: set[str]) -> str:
    """One of them, and how many there are besides."""
    return f"{min(names)} and {len(names) - 1} more" if len(names) > 1 else min(names)


@dataclass(frozen=True)
class Description:
    """The contents of `trainer.json`."""

    job_id: JobId
    version: Version
    updates: dict[str, int]
    """Number of optimizer updates of each model, by the prefix of the model's tensors."""
    kl_coefficient: float | None
    """The adapted coefficient; None in older checkpoints."""
    ranks: int
    """Number of ranks that wrote the checkpoint."""
    model_folder: str
    """Path of the job's model folder; empty in older checkpoints."""
    model: str
    """Hash of the manifest of the policy, hexadecimal: the checkpoint can be read into models with the same one."""
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file in `state/`, by name."""
    model_weights: str | None = None
    """Path of the checkpoint that the job's model was read from; None if that was the model folder."""
    adapter: dict[str, Any] | None = None
    """The settings of the adapter that was trained (`AdapterSettings`); None if all weights were."""

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        (folder / FILE).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Description | None":
        """The description in a checkpoint's folder; None if there is none of this format."""
        try:
            found = json.loads((folder / FILE).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            return None
        older = {"kl_coefficient": None, "model_folder": ""}
        return cls(**older | {one.name: found[one.name] for one in fields(cls) if one.name in found})
