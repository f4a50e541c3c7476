"""The trainer with a disk that a test holds up or fills: by files in the folder that DISK names. While there is
`held`, a part stays half written; while there is `full-RANK`, that rank finds no space."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import typer

from services.trainer import __main__ as trainer
from services.trainer.checkpoints import box_files, checkpoint

DISK = Path(os.environ["DISK"])


def write(path: Path, boxes: Any) -> None:
    if (DISK / f"full-{os.environ.get('RANK', '0')}").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    box_files.write(path, boxes)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    while (DISK / "held").exists():
        time.sleep(0.02)
    path.write_bytes(whole)


if __name__ == "__main__":
    checkpoint.write = write
    typer.run(trainer.main)
