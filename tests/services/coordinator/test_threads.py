"""Calls that hang hold up neither other calls nor the end of the event loop."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.coordinator import threads
from services.coordinator.threads import AT_A_TIME, Threads


def run(main: Callable[[], object], executor: ThreadPoolExecutor) -> object:
    async def whole() -> object:
        asyncio.get_running_loop().set_default_executor(executor)
        return await main()  # type: ignore[misc]

    with asyncio.Runner() as runner:
        return runner.run(whole())


def test_calls_that_hang_hold_up_neither_others_nor_the_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")

    async def main() -> str:
        hanging = [asyncio.create_task(asyncio.to_thread((tmp_path / "hangs").read_text)) for _ in range(3 * AT_A_TIME)]
        async with asyncio.timeout(60):
            answer = await asyncio.to_thread(str, "answered")
        assert not any(each.done() for each in hanging)
        return answer

    assert run(main, Threads()) == "answered"
    with (tmp_path / "hangs").open("w"):
        """The readers get their end of file."""


def test_calls_that_compute_run_a_few_at_a_time_and_each_is_answered() -> None:
    running, most = 0, 0
    changing, two = threading.Lock(), threading.Barrier(2, timeout=60)

    def compute(number: int) -> int:
        nonlocal running, most
        with changing:
            running += 1
            most = max(most, running)
        if number < 2:
            two.wait()
        with changing:
            running -= 1
        return number

    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(compute, number) for number in range(100)))

    assert run(main, Threads()) == list(range(100))
    assert 1 < most <= AT_A_TIME


def test_there_is_a_bound_for_calls_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MOST", 2)
    monkeypatch.setattr(threads, "SLOW_S", 0.001)
    opened = threading.Event()

    async def main() -> str:
        hanging = [asyncio.create_task(asyncio.to_thread(opened.wait)) for _ in range(2)]
        later = asyncio.create_task(asyncio.to_thread(str, "answered"))
        done, _ = await asyncio.wait([*hanging, later], timeout=0.2)
        assert not done
        opened.set()
        return await later

    assert run(main, Threads()) == "answered"


def test_the_caller_gets_what_a_call_raises() -> None:
    async def main() -> None:
        with pytest.raises(SystemExit, match="3"):
            await asyncio.to_thread(exit_with, 3)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)

    run(main, Threads())


def exit_with(status: int) -> None:
    raise SystemExit(status)
