"""A trainer that ends itself by SIGKILL at an instant that a test chose: `python -m tests.e2e.doomed_trainer OPTIONS`.

The environment variable DOOM names a file. While it has a JSON object {"method": ..., "after": ..., "delay_s": ...},
the next call of that method starts a clock: as it begins or, with `after`, once it has answered. When `delay_s` have
passed the process kills itself, whatever it does then. The file is gone by that time; DOOM.struck has the Unix time.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from services.trainer.__main__ import main
from services.trainer.service.servicer import TrainerService

DOOM = Path(os.environ["DOOM"])


def _strike() -> None:
    Path(f"{DOOM}.struck").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _start_clock(method: str, *, after: bool) -> None:
    try:
        asked = json.loads(DOOM.read_text())
    except FileNotFoundError:
        return
    if (asked["method"], asked["after"]) == (method, after):
        DOOM.unlink()
        threading.Timer(asked["delay_s"], _strike).start()


def doomed(method: str) -> Callable[..., Any]:
    served = getattr(TrainerService, method)

    async def serves(self: TrainerService, request: Any, context: Any) -> Any:
        _start_clock(method, after=False)
        answer = await served(self, request, context)
        _start_clock(method, after=True)
        return answer

    return serves


METHODS = ("AddPart", "Step", "PreparePublication", "TransferPublication", "FinishPublication", "Save", "FinishSave")

if __name__ == "__main__":
    for name in METHODS:
        setattr(TrainerService, name, doomed(name))
    sys.argv[0] = "services.trainer"
    typer.run(main)
