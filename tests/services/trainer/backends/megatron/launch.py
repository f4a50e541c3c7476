"""Ranks as processes of their own: Megatron wants one topology a process, and on the host it changes torch for all."""

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.forked import Forked
from tests.services.trainer.forked_ranks import ForkedRanks

Answer = TypeVar("Answer")


def once(launches: Callable[..., Answer]) -> Callable[..., Answer]:
    """`launches` for each of its arguments once: later calls have the same answer, or the same failure."""

    @functools.cache
    def tried(*arguments: Any) -> Answer | AssertionError:
        try:
            return launches(*arguments)
        except AssertionError as error:
            return error

    def answer(*arguments: Any) -> Answer:
        found = tried(*arguments)
        if isinstance(found, AssertionError):
            raise found
        return found

    return answer


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
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    started = ForkedRanks(module, [str(folder), arguments or json.dumps(calls)], {}, logs)
    try:
        _wait(started.processes, time.monotonic() + timeout_s)
        codes = [process.poll() for process in started.processes]
        told = "\n".join(f"rank {rank}:\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
        assert codes == [0] * ranks, f"exit codes {codes}\n{told}"
    finally:
        for process in started.processes:
            process.kill()
            process.wait()
    answers: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answers


def _wait(processes: Sequence[Forked], until: float) -> None:
    """Until all have ended well, or one has not."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes) or any(code for code in codes):
            return
        time.sleep(0.1)
