"""Checkpoints of the trainer: models, optimizers, the KL coefficient, and the version, which is all that scheduler and
RNG depend on.

Written with torch.distributed.checkpoint, so that any number of ranks reads what any other wrote. A checkpoint is a
folder that is whole or not there: it is written beside its place and then renamed.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from millrace.errors import InvalidState
from millrace.ids import JobId, Version
from millrace.wire.v1.trainer_pb2 import SaveResponse
from services.trainer import lockstep
from services.trainer.backends import Backend, models
from services.trainer.huggingface import write_folder

ABOUT = "trainer.json"
FORMAT = 1


def save(
    path: str,
    backend: Backend,
    *,
    job_id: JobId,
    version: Version,
    huggingface_from: str | None,
    kl_coefficient: float | None = None,
) -> SaveResponse:
    """Writes `path`; with `huggingface_from` (the job's model folder) also `path`/huggingface, and `path`/critic, from
    which another job's critic can start. All ranks call it.

    What is there already and whole, of the same job and version, is kept as it is. Raises InvalidState where the
    folder cannot be written.
    """
    began, target = time.monotonic(), Path(path)
    about = {
        "format": FORMAT,
        "job_id": job_id,
        "version": version,
        "updates": {prefix: model.updates for prefix, model in models(backend).items()},
        "kl_coefficient": kl_coefficient,
        "ranks": lockstep.ranks(),
        "model": backend.manifest("float32").hash.hex(),
        "huggingface": huggingface_from is not None,
    }
    if _agreed(_about(target) == about):
        return SaveResponse(version=version, bytes=_bytes(target), seconds=time.monotonic() - began)
    partial = target.with_name(f".{target.name}.partial")
    with lockstep.together():
        if dist.get_rank() == 0:
            _empty_folder(partial)
    state = {f"{prefix}{name}": t for prefix, model in models(backend).items() for name, t in model.state().items()}
    dcp.save(state, checkpoint_id=partial / "state")
    if huggingface_from is not None:
        write_folder(partial / "huggingface", backend.export, Path(huggingface_from))
        if (critic := backend.critic) is not None:
            write_folder(partial / "critic", critic.export, critic.folder, critic.config)
    with lockstep.together():
        if dist.get_rank() == 0:
            (partial / ABOUT).write_text(json.dumps(about, indent=1))
            _put_in_place(partial, target)
    return SaveResponse(version=version, bytes=_bytes(target), seconds=time.monotonic() - began)


def load(path: str, backend: Backend) -> Version:
    """Reads `path` into the backend; returns its version. All ranks call it.

    Raises InvalidState, with the backend as it was, where there is no whole checkpoint or it is of another model.
    """
    folder = Path(path)
    with lockstep.together():
        about = _about(folder)
        if about is None or about.get("format") != FORMAT:
            raise InvalidState(
                f"{path} is not a checkpoint of this trainer: no {ABOUT} of format {FORMAT} there.", _MEND
            )
        if about["model"] != backend.manifest("float32").hash.hex():
            raise InvalidState(f"{path} is a checkpoint of another model than the job's.", _MEND)
        updates = _updates(about)
        if lacking := models(backend).keys() - updates.keys():
            what = f"{path} is a checkpoint without {', '.join(sorted(lacking)).rstrip('.')}, which this job trains."
            raise InvalidState(what, _MEND)
    state: dict[str, Any] = {}
    for prefix, model in models(backend).items():
        state |= {f"{prefix}{name}": tensor for name, tensor in model.prepare_state(updates[prefix]).items()}
    try:
        dcp.load(state, checkpoint_id=folder / "state")
    except CheckpointException as error:
        raise InvalidState(f"{path} is damaged: {error}", "configure the trainer from another checkpoint.") from error
    return Version(about["version"])


def kl_coefficient(path: str, otherwise: float) -> float:
    """As it stood in the checkpoint at `path`; `otherwise` where that does not tell."""
    found = (_about(Path(path)) or {}).get("kl_coefficient")
    return otherwise if found is None else float(found)


_MEND = "give the folder of a checkpoint that this job has saved."


def _updates(about: dict[str, Any]) -> dict[str, int]:
    """Of each model in it, by the prefix of its tensors; a number alone is the policy's."""
    updates = about["updates"]
    return dict(updates) if isinstance(updates, dict) else {"": updates}


def _agreed(answer: bool) -> bool:
    return all(data == b"yes" for data in lockstep.gather_bytes(b"yes" if answer else b"no"))


def _about(folder: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((folder / ABOUT).read_text()))
    except (OSError, ValueError):
        return None


def _empty_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise InvalidState(
            f"the checkpoint cannot be written to {folder.parent}: {error}", "make room there."
        ) from error


def _put_in_place(partial: Path, target: Path) -> None:
    """Renames; what was at `target` is moved out of the way first and deleted last."""
    for file in partial.rglob("*"):
        if file.is_file():
            _sync(file)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
