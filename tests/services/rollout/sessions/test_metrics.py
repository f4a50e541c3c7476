"""What Prometheus reads of sessions."""

import asyncio
import time

from prometheus_client import generate_latest

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from services.rollout.engine import Completion, Sampling
from services.rollout.sessions.open_sessions import SessionMetrics
from tests.services.rollout.sessions.served import Served, served, user

ENGINE_S = 0.3


def told(registry: DeclaredRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"millrace_session_{name}", labels)


def test_requests_are_counted_by_api_and_status() -> None:
    registry = DeclaredRegistry(Owner.REPLICA)
    asked = "requests_total"

    async def scenario() -> None:
        async with served(metrics=SessionMetrics(registry)) as here:
            assert told(registry, asked, api="claim", status="429") == 0.0
            await here.http.post("/sessions")
            playing, claimed = here.play(), await here.claim()
            assert told(registry, asked, api="claim", status="201") == 1.0
            assert (told(registry, asked, api="claim", status="429") or 0.0) >= 1.0
            await here.chat(claimed, user("hi"))
            for path, body in (("/v1/chat/completions", {"stream": True}), ("/v1/messages", {"max_tokens": 9})):
                await here.post(claimed, path, messages=[user("again")], **body)
            await here.post(claimed, "/v1/chat/completions", messages=[])
            await here.post({**claimed, "key": "wrong"}, "/reward", reward=1.0)
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())
    assert told(registry, asked, api="chat_completions", status="200") == 2.0
    assert told(registry, asked, api="chat_completions", status="400") == 1.0
    assert told(registry, asked, api="messages", status="200") == told(registry, asked, api="end", status="200") == 1.0
    assert told(registry, asked, api="reward", status="401") == 1.0
    assert told(registry, "overhead_seconds_count", api="chat_completions") == 2.0
    assert told(registry, "overhead_seconds_count", api="messages") == 1.0


def test_overhead_leaves_out_the_seconds_in_the_engine() -> None:
    registry = DeclaredRegistry(Owner.REPLICA)

    async def turn(here: Served) -> float:
        generate = here.engine.generate

        async def slow(prompt: list[int], sampling: Sampling) -> Completion:
            await asyncio.sleep(ENGINE_S)
            return await generate(prompt, sampling)  # type: ignore[no-any-return]

        here.engine.generate = slow
        playing, claimed = here.play(), await here.claim()
        began = time.perf_counter()
        await here.chat(claimed, user("hi"))
        seconds = time.perf_counter() - began
        await here.post(claimed, "/end")
        await playing
        return seconds

    async def scenario() -> float:
        async with served(metrics=SessionMetrics(registry)) as here:
            return await turn(here)

    seconds = asyncio.run(scenario())
    overhead = told(registry, "overhead_seconds_sum", api="chat_completions")
    assert overhead is not None and 0.0 < overhead <= seconds - ENGINE_S


def test_open_and_abandoned_sessions_are_told() -> None:
    registry = DeclaredRegistry(Owner.REPLICA)

    async def scenario() -> None:
        metrics = SessionMetrics(registry)
        async with served(metrics=metrics, episode_s=0.2) as here:
            sessions, playing = here.episodes.sessions, [here.play(), here.play()]
            await here.claim()
            metrics.show(len(sessions), sessions.waiting)
            page = generate_latest(registry).decode()
            assert "\nmillrace_sessions_open 2.0\n" in page and "\nmillrace_sessions_waiting 1.0\n" in page
            for _ in range(3):
                await here.claim()
            ended = await asyncio.gather(*playing, return_exceptions=True)
            assert all(isinstance(each, Exception) for each in ended)

    asyncio.run(scenario())
    assert "\nmillrace_sessions_abandoned_total 4.0\n" in generate_latest(registry).decode()
