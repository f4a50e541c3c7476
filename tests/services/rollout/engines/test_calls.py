"""A call whose caller goes away."""

import asyncio
from typing import Any

from structlog.testing import capture_logs

from services.rollout.server import RolloutServicer


def test_it_goes_on_and_a_failure_is_told_once() -> None:
    unhandled: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        servicer, may_end = RolloutServicer(None), asyncio.Event()  # type: ignore[arg-type]

        async def starts_an_engine() -> None:
            await may_end.wait()
            raise RuntimeError("no memory is left")

        call = asyncio.create_task(servicer._to_its_end(starts_an_engine()))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() and servicer._tasks, "it goes on"
        may_end.set()
        await asyncio.wait(list(servicer._tasks))
        await asyncio.sleep(0)

    with capture_logs() as told:
        asyncio.run(scenario())
    assert [(line["log_level"], line["error"]) for line in told] == [("warning", "no memory is left")]
    assert unhandled == []
