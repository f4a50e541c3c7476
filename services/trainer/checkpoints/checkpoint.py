"""Checkpoints of the trainer: models, optimizers, the KL coefficient, and the version, which is all that scheduler and
RNG depend on.

A folder of safetensors and JSON: each rank writes the boxes of each tensor that it has into a file of its own, so that
any number of ranks reads what any other wrote. A checkpoint is whole or not there: it is written beside its place and
renamed once every rank's file is on the disk. What a crash leaves behind is never taken for one and goes with the next.
"""

import json
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import InvalidState, MillraceError
from millrace.ids import JobId, Version
from services.trainer.checkpoints.box_files import BoxReader, assign_writers, key, write
from services.trainer.checkpoints.huggingface import write_folder
from services.trainer.protocol.backend import Backend, models
from services.trainer.protocol.local_tensors import is_saved_here, local_parts
from services.trainer.ranks import collectives

ABOUT = "trainer.json"
FORMAT = 2
PARTIAL = ".partial"


@dataclass
class PendingCheckpoint:
    """A checkpoint on its way: every rank writes its part, then rank 0 puts it in its place."""

    target: Path
    version: Version
    _rank: int
    _partial: Path
    _about: dict[str, Any]
    _boxes: dict[str, Tensor] = field(repr=False)

    def write(self) -> None:
        """This rank's part, from any thread; afterwards its boxes are let go. Raises OSError."""
        boxes, self._boxes = self._boxes, {}
        write(self._partial / "state" / _file(self._rank), boxes)

    def commit(self) -> int:
        """Rank 0, once all have written: puts the checkpoint in its place; its bytes. Raises InvalidState."""
        try:
            files = {file.name: file.stat().st_size for file in (self._partial / "state").iterdir()}
            for rank in range(self._about["ranks"]):
                if _file(rank) not in files:
                    what = f"{self.target} lacks the part of rank {rank}: rank 0 does not see what it wrote."
                    raise InvalidState(what, "let `output` be a folder that all ranks share.")
            (self._partial / ABOUT).write_text(json.dumps({**self._about, "files": files}, indent=1))
            _put_in_place(self._partial, self.target)
            return _bytes(self.target)
        except OSError as error:
            raise InvalidState(f"{self.target} could not be put in its place: {error}", _ROOM) from error

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


def prepare(
    path: str,
    backend: Backend,
    *,
    job_id: JobId,
    version: Version,
    model: str,
    huggingface: bool,
    kl_coefficient: float | None = None,
    copied: bool,
) -> PendingCheckpoint:
    """The state as it is now, to be written to `path`: `copied` to host memory, where training is to go on before it is
    written, else where it lies. `model` is the job's model folder. With `huggingface`, `path`/huggingface is written at
    once, and `path`/critic, from which another job's critic can start. All ranks call it.

    Raises InvalidState where the folder cannot be written.
    """
    target, rank = Path(path), dist.get_rank()
    token = collectives.gather_bytes(uuid.uuid4().hex.encode() if rank == 0 else b"")[0].decode()
    partial = target.with_name(f".{target.name}.{token}{PARTIAL}")
    with collectives.fail_together():
        if rank == 0:
            _begin(partial)
    about = {
        "format": FORMAT,
        "job_id": job_id,
        "version": version,
        "updates": {prefix: model.updates for prefix, model in models(backend).items()},
        "kl_coefficient": kl_coefficient,
        "ranks": collectives.world_size(),
        "model_folder": model,
        "model": backend.manifest("float32").hash.hex(),
    }
    if huggingface:
        write_folder(partial / "huggingface", backend.export, Path(model))
        if (critic := backend.critic) is not None:
            write_folder(partial / "critic", critic.export, critic.folder, critic.config)
    boxes = _own_boxes(backend)
    if copied:
        boxes = {name: torch.empty(box.shape, dtype=box.dtype).copy_(box) for name, box in boxes.items()}
    return PendingCheckpoint(target, version, rank, partial, about, boxes)


def write_now(pending: PendingCheckpoint) -> int:
    """Writes it now; its bytes, on rank 0. All ranks call it. Raises InvalidState on all."""
    try:
        with collectives.fail_together():
            try:
                pending.write()
            except OSError as error:
                what = f"rank {dist.get_rank()} could not write its part of {pending.target}: {error}"
                raise InvalidState(what, _ROOM) from error
        with collectives.fail_together():
            return pending.commit() if dist.get_rank() == 0 else 0
    except MillraceError:
        pending.discard()
        raise


def load(path: str, backend: Backend) -> Version:
    """Reads `path` into the backend; returns its version. All ranks call it.

    Raises InvalidState, with the backend as it was, where there is no whole checkpoint or it is of another model.
    """
    folder = Path(path)
    with collectives.fail_together():
        if dist.get_rank() == 0 and not folder.exists() and _old(folder).exists():
            os.rename(_old(folder), folder)  # a crash came between the two renames that replace a checkpoint
    with collectives.fail_together():
        about, stored = open_checkpoint(folder)
        if about["model"] != backend.manifest("float32").hash.hex():
            raise InvalidState(f"{path} is a checkpoint of another model than the job's.", _FIX)
        updates = about["updates"]
        if lacking := models(backend).keys() - updates.keys():
            what = f"{path} is a checkpoint without {', '.join(sorted(lacking)).rstrip('.')}, which this job trains."
            raise InvalidState(what, _FIX)
    states = {prefix: model.prepare_state(updates[prefix]) for prefix, model in models(backend).items()}
    with collectives.fail_together():
        for prefix, state in states.items():
            for name, tensor in state.items():
                for offset, part in local_parts(tensor).items():
                    stored.fill(f"{prefix}{name}", offset, part)
    return Version(about["version"])


def open_checkpoint(folder: Path) -> tuple[dict[str, Any], BoxReader]:
    """What `trainer.json` says, and the boxes. Raises InvalidState where there is no whole checkpoint."""
    about = _about(folder)
    if about is None or about.get("format") != FORMAT:
        raise InvalidState(f"{folder} is not a checkpoint of this trainer: no {ABOUT} of format {FORMAT} there.", _FIX)
    return about, BoxReader(_whole_files(folder / "state", about["files"]))


def kl_coefficient(path: str, otherwise: float) -> float:
    """As it stood in the checkpoint at `path`; `otherwise` where that does not tell."""
    found = (_about(Path(path)) or {}).get("kl_coefficient")
    return otherwise if found is None else float(found)


_FIX = "give the folder of a checkpoint that this job has saved: OUTPUT/checkpoints/step-N."
_ROOM = "make room there, or let the trainer write to that folder."


def _own_boxes(backend: Backend) -> dict[str, Tensor]:
    """What this rank is to write, by key: of what several ranks have, its share."""
    offered = {
        key(f"{prefix}{name}", offset, part.shape): part
        for prefix, model in models(backend).items()
        for name, tensor in model.state().items()
        if is_saved_here(tensor)
        for offset, part in local_parts(tensor).items()
    }
    sizes = {name: part.numel() * part.element_size() for name, part in offered.items()}
    offers = [json.loads(offer) for offer in collectives.gather_bytes(json.dumps(sizes).encode())]
    return {name: offered[name] for name in assign_writers(offers)[dist.get_rank()]}


def _file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def _whole_files(folder: Path, sizes: dict[str, int]) -> list[Path]:
    """Raises InvalidState where one is missing or has another size than it was written with."""
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            what = f"{path} is damaged: it was written with {size} bytes and has {found}."
            raise InvalidState(what, "configure the trainer from another checkpoint.")
    return [folder / name for name in sizes]


def _about(folder: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((folder / ABOUT).read_text()))
    except (OSError, ValueError):
        return None


def _begin(partial: Path) -> None:
    """An empty folder to write to; those of saves that were broken off go."""
    try:
        (partial / "state").mkdir(parents=True)
        for left in partial.parent.glob(f".*{PARTIAL}"):
            if left != partial:
                shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise InvalidState(f"the checkpoint cannot be written to {partial.parent}: {error}", _ROOM) from error


def _put_in_place(partial: Path, target: Path) -> None:
    """Renames; what was at `target` is moved out of the way first and deleted last."""
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _sync(path: Path) -> None:
    """A file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
