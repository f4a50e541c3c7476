"""Checkpoints of the trainer: models, optimizers, KL coefficient and version. Learning rates and random numbers follow
from the version.

A checkpoint is a folder of safetensors and JSON. Each rank writes the boxes of each tensor that it holds into its own
file, and any number of ranks reads what any other number wrote. A checkpoint is complete or does not exist: it is
written to a folder with another name, which is renamed once the file of every rank is on the disk. What a crash leaves
has that other name; it is never loaded, and the next save deletes it.
"""

import json
import os
import shutil
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from millrace.errors import InvalidState, MillraceError
from millrace.ids import JobId, Version
from services.trainer.checkpoints import FILE, FORMAT
from services.trainer.checkpoints.box_files import BoxReader, assign_writers, keyed_parts, write
from services.trainer.checkpoints.copying import copied_to_host
from services.trainer.checkpoints.huggingface import GatheredAdapter, write_folder
from services.trainer.protocol.adapter import is_adapter
from services.trainer.protocol.backend import Backend, models
from services.trainer.protocol.local_tensors import is_saved_here, local_parts
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
        """The description in a checkpoint's folder; None if there is none of this format, or a field is missing."""
        older = {"kl_coefficient": None, "model_folder": ""}
        try:
            found = json.loads((folder / FILE).read_text())
            if found["format"] != FORMAT:
                return None
            return cls(**older | {one.name: found[one.name] for one in fields(cls) if one.name in found})
        except (OSError, ValueError, TypeError, KeyError):
            return None


PARTIAL = ".partial"
"""Ending of the name of a folder that is being written."""


@dataclass
class PendingCheckpoint:
    """A checkpoint that is not yet in its place: every rank writes its part, then rank 0 renames the folder."""

    target: Path
    version: Version
    _rank: int
    _partial: Path
    _description: Description
    _boxes: dict[str, Tensor] = field(repr=False)
    _adapter: GatheredAdapter | None = field(repr=False)

    def write(self) -> None:
        """Writes this rank's part and frees its tensors. From any thread. Raises OSError."""
        boxes, self._boxes = self._boxes, {}
        write(self._partial / "state" / _file(self._rank), boxes)
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.write(self._partial / "adapter")

    def commit(self) -> int:
        """Puts the checkpoint in its place and returns its size in bytes. To be called on rank 0, once all ranks have
        written. Raises InvalidState."""
        try:
            files = {file.name: file.stat().st_size for file in (self._partial / "state").iterdir()}
            for rank in range(self._description.ranks):
                if _file(rank) not in files:
                    what = f"{self.target} lacks the part of rank {rank}: rank 0 does not see what that rank wrote."
                    raise InvalidState(what, "let `output` be a folder that all ranks share.")
            replace(self._description, files=files).write(self._partial)
            _put_in_place(self._partial, self.target)
            return _bytes(self.target)
        except OSError as error:
            raise InvalidState(f"{self.target} could not be put in its place: {error}", _ROOM) from error

    def discard(self) -> None:
        """Deletes what was written."""
        shutil.rmtree(self._partial, ignore_errors=True)


def copy_for_saving(
    path: str,
    backend: Backend,
    *,
    job_id: JobId,
    version: Version,
    model: str,
    model_name: str | None = None,
    weights: str | None = None,
    huggingface: bool,
    kl_coefficient: float | None = None,
    copied: bool,
) -> PendingCheckpoint:
    """Takes the present state, to be written to `path`. A collective.

    `copied`: the state is copied to host memory, so that training may continue before it is written; else it stays
    where it is. `model` and `weights` are the job's on this host, and `model_name` is what the job calls the model. For
    a job with `model.lora` the state has `path`/adapter too, as PEFT stores it. With `huggingface` the folder
    `path`/huggingface of a job without is written at once, and `path`/critic, from which another job's critic can
    start. Raises InvalidState if the folder cannot be written.
    """
    target, rank = Path(path), dist.get_rank()
    token = collectives.gather_bytes(uuid.uuid4().hex.encode() if rank == 0 else b"")[0].decode()
    partial = target.with_name(f".{target.name}.{token}{PARTIAL}")
    with collectives.fail_together():
        if rank == 0:
            _begin(partial)
    description = Description(
        job_id=job_id,
        version=version,
        updates={prefix: trained.updates for prefix, trained in models(backend).items()},
        kl_coefficient=kl_coefficient,
        ranks=collectives.world_size(),
        model_folder=model,
        model_weights=weights,
        model=backend.manifest("float32").hash.hex(),
        adapter=_adapter(backend),
    )
    if huggingface:
        try:
            _write_folders(partial, backend, Path(model), _path(weights))
        except MillraceError:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # it would fill the disk until the next checkpoint
            raise
    boxes = _own_boxes(backend)
    if copied:
        boxes = copied_to_host(boxes)
    adapter = None if backend.adapter is None else GatheredAdapter.gather(backend.adapter, model_name or model)
    return PendingCheckpoint(target, version, rank, partial, description, boxes, adapter)


def write_now(pending: PendingCheckpoint) -> int:
    """Writes the checkpoint before it returns its size in bytes (on rank 0). A collective. Raises InvalidState on every
    rank."""
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


def load(path: str, backend: Backend) -> Description:
    """Reads the checkpoint at `path` into the backend. A collective.

    Raises InvalidState if there is no complete checkpoint of the job's model: the backend is unchanged then.
    """
    folder = Path(path)
    with collectives.fail_together():
        if dist.get_rank() == 0 and not folder.exists() and _old(folder).exists():
            os.rename(_old(folder), folder)  # a crash came between the two renames that replace a checkpoint
    with collectives.fail_together():
        description, stored = open_checkpoint(folder)
        if description.model != backend.manifest("float32").hash.hex():
            raise InvalidState(f"{path} is a checkpoint of another model than the job's.", _FIX)
        updates = description.updates
        if description.adapter != _adapter(backend):
            what = (
                f"{path} was trained with {_named(description.adapter)}, this job trains {_named(_adapter(backend))}."
            )
            raise InvalidState(what, "give the job the model.lora of the job that saved it.")
        if lacking := models(backend).keys() - updates.keys():
            what = f"{path} is a checkpoint without {', '.join(sorted(lacking)).rstrip('.')}, which this job trains."
            raise InvalidState(what, _FIX)
    trained = trained_names(backend)
    with collectives.fail_together():
        check_names(path, trained, stored.names)
    states = {prefix: model.prepare_state(updates[prefix]) for prefix, model in models(backend).items()}
    with collectives.fail_together():
        for prefix, state in states.items():
            for name, tensor in state.items():
                for offset, part in local_parts(tensor).items():
                    stored.fill(f"{prefix}{name}", offset, part)
    return description


def _adapter(backend: Backend) -> dict[str, Any] | None:
    return None if backend.adapter is None else backend.adapter.settings.to_json()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _named(adapter: dict[str, Any] | None) -> str:
    return "all weights" if adapter is None else f"adapters of rank {adapter['rank']} and alpha {adapter['alpha']}"


def open_checkpoint(folder: Path) -> tuple[Description, BoxReader]:
    """The description of a checkpoint, and its tensors. Raises InvalidState if there is no complete checkpoint."""
    description = Description.read(folder)
    if description is None:
        raise InvalidState(f"{folder} is not a checkpoint of this trainer: no {FILE} of format {FORMAT} there.", _FIX)
    return description, BoxReader(_complete_files(folder / "state", description.files))


_FIX = "give the folder of a checkpoint that this job has saved: OUTPUT/checkpoints/step-N."
_ROOM = "free disk space there, or let the trainer write to that folder."


def _own_boxes(backend: Backend) -> dict[str, Tensor]:
    """The boxes that this rank writes, by key: its share of those that several ranks hold."""
    offered: dict[str, Tensor] = {}
    for prefix, model in models(backend).items():
        offered |= keyed_parts(prefix, {name: each for name, each in model.state().items() if is_saved_here(each)})
    sizes = {name: part.numel() * part.element_size() for name, part in offered.items()}
    offers = [json.loads(offer) for offer in collectives.gather_bytes(json.dumps(sizes).encode())]
    return {name: offered[name] for name in assign_writers(offers)[dist.get_rank()]}


def _file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def _complete_files(folder: Path, sizes: dict[str, int]) -> list[Path]:
    """The files with these names. Raises InvalidState if one is missing or has another size than it was written
    with."""
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            what = f"{path} is damaged: it was written with {size} bytes and has {found}."
            raise InvalidState(what, "configure the trainer from another checkpoint.")
    return [folder / name for name in sizes]


def _write_folders(partial: Path, backend: Backend, model: Path, weights: Path | None) -> None:
    """The folders that transformers reads: of the policy, if all its weights are trained, and of the critic."""
    if backend.adapter is None:
        write_folder(partial / "huggingface", backend.export, model, weights=weights)
    if (critic := backend.critic) is not None:
        own = None if critic.folder != model else weights
        write_folder(partial / "critic", critic.export, critic.folder, critic.config, own)


def _begin(partial: Path) -> None:
    """Makes an empty folder to write to, and deletes those of interrupted saves."""
    try:
        (partial / "state").mkdir(parents=True)
        for left in partial.parent.glob(f".*{PARTIAL}"):
            if left != partial:
                shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise InvalidState(f"the checkpoint cannot be written to {partial.parent}: {error}", _ROOM) from error


def _put_in_place(partial: Path, target: Path) -> None:
    """Renames the folder. An older checkpoint at `target` is renamed first and deleted last."""
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
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
