"""How fast the trainer writes a checkpoint, beside the disk's own speed.

    python -m benchmarks.saving --shape qwen3-1.7b --folder /data/checkpoints

Random weights of a published shape on FSDP2, after one update; the state is weights and moments in float32, 12 bytes a
parameter. In turn the disk alone (as many bytes from memory, flushed at the end), a save that training waits for, and
one in the background: the seconds for which training pauses while the state is copied, and those until it is on the
disk. Prints a JSON object for each round.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import config_of, cut
from benchmarks.training import Case, draw_fsdp2_weights, job_spec, joined, micro_batches, update
from millrace.ids import JobId, Version
from millrace.megatron.architectures.published import shape_of
from services.trainer.backends import build
from services.trainer.checkpoints.checkpoint import PendingCheckpoint, copy_for_saving, write_now
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.world import World

BLOCK_BYTES = 64 << 20
TOKENS = 8192
"""Number of tokens of the update before the saves."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary folder if left out")
    options = parser.parse_args()
    world = joined()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        backend = trained(Path(folder) / "model", options, world)
        for number in range(options.rounds):
            print(json.dumps(saved(Path(folder) / str(number), backend)), flush=True)


def trained(folder: Path, options: argparse.Namespace, world: World) -> Backend:
    """A backend with moments."""
    shape = cut(shape_of(options.shape), options.layers, options.vocabulary)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    case = Case(folder, "fsdp2", "mixed", TOKENS, tokens=TOKENS)
    draw_fsdp2_weights()
    backend = build(job_spec(case), world.device)
    update(backend, micro_batches(case, shape.vocabulary, 0, 1)[0])
    return backend


def saved(folder: Path, backend: Backend) -> dict[str, Any]:
    folder.mkdir()
    began = time.perf_counter()
    size = write_now(pending(folder / "waited", backend, copied=False))
    waited_s = time.perf_counter() - began
    shutil.rmtree(folder / "waited")
    alone_s = disk_alone(folder / "alone", size)
    began = time.perf_counter()
    copied = pending(folder / "background", backend, copied=True)
    pause_s = time.perf_counter() - began
    copied.write()
    copied.commit()
    background_s = time.perf_counter() - began
    shutil.rmtree(folder)
    return {
        "parameters": backend.parameters,
        "gb": round(size / 1e9, 2),
        "disk_alone_gb_s": round(size / alone_s / 1e9, 2),
        "waited_s": round(waited_s, 2),
        "waited_gb_s": round(size / waited_s / 1e9, 2),
        "pause_s": round(pause_s, 2),
        "background_s": round(background_s, 2),
        "background_gb_s": round(size / (background_s - pause_s) / 1e9, 2),
    }


def pending(target: Path, backend: Backend, *, copied: bool) -> PendingCheckpoint:
    about = {"job_id": JobId("saving"), "version": Version(1), "model": str(target), "huggingface": False}
    return copy_for_saving(str(target), backend, copied=copied, **about)  # type: ignore[arg-type]


def disk_alone(path: Path, size: int) -> float:
    """Seconds in which the disk takes so many bytes."""
    block = os.urandom(BLOCK_BYTES)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for first in range(0, size, BLOCK_BYTES):
            file.write(memoryview(block)[: min(BLOCK_BYTES, size - first)])
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


if __name__ == "__main__":
    main()
