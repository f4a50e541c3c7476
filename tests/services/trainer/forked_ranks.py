"""Ranks that are forked (see tests/forked.py) and meet as torchrun's do: at a store that another process serves."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from tests.forked import Forked


class ForkedRanks:
    """Runs `python -m module arguments...` on each rank. Rank 0 writes to the first of `logs`, and so on."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], logs: Sequence[Path]
    ) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **environment,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(len(logs)),
            # The store is served here, not by rank 0.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(logs))]
        self.processes = [Forked(module, arguments, shared | one, log) for one, log in zip(own, logs, strict=True)]
