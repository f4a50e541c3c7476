"""What a job has written: whole checkpoints, nothing pickled, no secret."""

import io
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from benchmarks.chaos.observation import Observation
from services.trainer.checkpoints.checkpoint import Description

PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
LINE = "1 a checkpoint is complete"
NO_PICKLE = "6 no pickle, no secret"


def checkpoint_is_whole(seen: Observation) -> Iterator[str]:
    """The newest checkpoint: of its version, with one optimizer update a step, every file readable and as long as its
    description says."""
    if not (path := seen.record.get("checkpoint")):
        return
    folder, step = Path(path), int(seen.record["checkpoint_step"])
    found = Description.read(folder)
    if found is None:
        yield f"{LINE}: {folder} is named by the job and is none"
        return
    if found.version != step or any(updates != step for updates in found.updates.values()):
        yield f"{LINE}: {folder} is of version {found.version} after {found.updates} updates, and of step {step}"
    for name, size in found.files.items():
        file = folder / "state" / name
        if not file.is_file() or file.stat().st_size != size:
            yield f"{LINE}: {file} has not the {size} bytes that it is described with"
        elif name.endswith(".safetensors"):
            try:
                with safe_open(file, framework="numpy") as tensors:
                    list(tensors.keys())
            except (SafetensorError, OSError) as error:
                yield f"{LINE}: {file} cannot be read: {error}"


def nothing_forbidden(folders: Iterable[Path], values: Iterable[bytes], secret: str) -> Iterator[str]:
    """No file below `folders` and no value of Redis is pickled or holds `secret`."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        content = path.read_bytes()
        if is_pickled(content):
            yield f"{NO_PICKLE}: {path} is a pickle"
        if secret.encode() in content:
            yield f"{NO_PICKLE}: {path} holds the token"
    for value in values:
        if is_pickled(value):
            yield f"{NO_PICKLE}: Redis holds a pickle: {value[:40]!r}"
        if secret.encode() in value:
            yield f"{NO_PICKLE}: Redis holds the token: {value[:40]!r}"


def is_pickled(content: bytes) -> bool:
    """Whether `content` is a pickle, or an archive with pickles in it, as torch.save writes."""
    if content.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return any(is_pickled(archive.read(name)) for name in archive.namelist())
    if not content.startswith(PICKLES):
        return False
    try:
        *_, (last, _, _) = pickletools.genops(content)
    except ValueError:
        return False
    return last.name == "STOP"
