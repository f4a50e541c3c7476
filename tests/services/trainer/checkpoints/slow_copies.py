"""A trainer whose copies of the state take as long as those of a large model: in small messages, with pauses between
them."""

import sys
import time
from typing import Any

import typer

from services.trainer.__main__ import main
from services.trainer.checkpoints import standby_copies

PAUSE_S = 0.003

exchange = standby_copies._Messages._exchange


def slowly(self: Any, data: Any, *, sends: bool) -> None:
    time.sleep(PAUSE_S)
    exchange(self, data, sends=sends)


if __name__ == "__main__":
    standby_copies.PIECE_BYTES = 4096
    standby_copies._Messages._exchange = slowly  # type: ignore[method-assign]
    sys.argv[0] = "services.trainer"
    typer.run(main)
