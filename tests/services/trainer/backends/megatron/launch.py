"""Ranks as processes of their own: Megatron wants one topology a process, and on the host it changes torch for all."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from millrace.local.ports import free_port

ROOT = Path(__file__).parents[5]


def launch(
    ranks: int,
    folder: Path,
    *,
    timeout_s: float = 600.0,
    module: str = "tests.services.trainer.backends.megatron.on_ranks",
    arguments: str = "",
    **calls: dict[str, Any],
) -> dict[str, Any]:
    """Calls functions of `on_ranks`, by name with their arguments, on so many ranks over Gloo; rank 0's answers. Or
    runs another `module` with `arguments`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", module, str(folder), arguments or json.dumps(calls)]
    logs = [(folder / f"rank-{rank}.log").open("w") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        _wait(processes, time.monotonic() + timeout_s)
        codes = [process.returncode for process in processes]
        told = "\n".join(f"rank {rank}:\n{Path(log.name).read_text()[-3000:]}" for rank, log in enumerate(logs))
        assert codes == [0] * ranks, f"exit codes {codes}\n{told}"
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    answers: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answers


def _wait(processes: list[subprocess.Popen], until: float) -> None:
    """Until all have ended well, or one has not."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes) or any(code for code in codes):
            return
        time.sleep(0.1)
