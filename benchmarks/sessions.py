"""What the endpoint of sessions costs, with many sessions open at once and an engine that only waits.

    python -m benchmarks.sessions --sessions 2000 --turns 4 --pause-s 20

The server is this process: sessions, chat format and HTTP as in a replica; the engine sleeps and hands out tokens. The
agents are another process, each with a connection of its own: they claim a session, ask for `--turns` turns of chat
completions with the whole history each time, pause between them as long as a tool might (exponential, mean
`--pause-s`), and end. Overhead is the time from a request's arrival at the application to the end of its answer, less
the seconds in the engine. Prints one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import psutil

from millrace.data.chat import Rendered
from millrace.data.row import PromptRow
from millrace.demo.tokenizer import byte_tokenizer
from millrace.ids import Version
from millrace.service_process import collect_rarely
from millrace.spec import parse
from millrace.telemetry import logs
from services.rollout.engine import Completion, Sampling, StopReason, VersionSpan
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Prompt
from services.rollout.episode.slots import Slots
from services.rollout.sessions.episodes import AgentEpisodes
from services.rollout.sessions.open_sessions import OpenSessions
from services.rollout.sessions.policy import Chats
from services.rollout.sessions.server import SessionServer, application

ENGINE_SECONDS: ContextVar[list[float] | None] = ContextVar("engine_seconds", default=None)
"""The list of the running request, to which the engine adds its own seconds."""
PROMPT: Any = [{"role": "user", "content": "Find the number that I think of. " * 8}]
LONGEST_IDLE_S = 20.0
PERCENTILES = (50, 90, 99, 99.9)


class WaitingEngine:
    """Sleeps, and hands out tokens."""

    def __init__(self, tokens: int, seconds: float) -> None:
        self._answer = np.array([*([65] * (tokens - 1)), 258], np.int32)
        self._seconds = seconds

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        began = time.perf_counter()
        await asyncio.sleep(random.expovariate(1 / self._seconds))
        if (spent := ENGINE_SECONDS.get()) is not None:
            spent.append(time.perf_counter() - began)
        count = len(self._answer)
        spans, values = (VersionSpan(Version(0), 0, count),), np.full(count, -0.5, np.float32)
        return Completion(self._answer, values, spans, StopReason.END_OF_TURN, "A" * (count - 1))


class Timed:
    """An application, and the overhead of each of its turns, seconds."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app, self.overheads = app, list[float]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            return await self._app(scope, receive, send)
        spent: list[float] = []
        began, before = time.perf_counter(), ENGINE_SECONDS.set(spent)
        try:
            await self._app(scope, receive, send)
        finally:
            ENGINE_SECONDS.reset(before)
            if spent:
                self.overheads.append(time.perf_counter() - began - sum(spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4, help="of each session")
    parser.add_argument("--tokens", type=int, default=64, help="of each turn")
    parser.add_argument("--engine-s", type=float, default=2.0, help="mean seconds of a turn in the engine")
    parser.add_argument("--pause-s", type=float, default=20.0, help="mean seconds between turns")
    options = parser.parse_args()
    logs.configure("bench")
    collect_rarely()  # as a replica does
    print(json.dumps(asyncio.run(measure(options)), indent=2))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    sessions = OpenSessions()
    timed = Timed(application(sessions, ""))
    server = SessionServer(sessions, "127.0.0.1", 0, app=timed)
    server.start()
    tokenizer: Any = byte_tokenizer()
    rendered = list(tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False))
    episodes = _episodes(sessions, tokenizer)
    process = psutil.Process()
    before = process.memory_info().rss
    engine: Any = WaitingEngine(options.tokens, options.engine_s)
    prompt = Prompt(PromptRow(0, "bench", PROMPT, "37"), Rendered(rendered), "")
    began = time.monotonic()

    async def play() -> None:
        with Slots(1).episode() as slot:
            await episodes(engine, prompt, Sampling(32_768), slot)

    playing = [asyncio.create_task(play()) for _ in range(options.sessions)]
    agents = multiprocessing.get_context("spawn").Process(
        target=run_agents, args=(server.port, options.sessions, options.turns, options.pause_s)
    )
    agents.start()
    turns = options.sessions * options.turns
    while len(timed.overheads) < turns and agents.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    largest, open_now, seconds = process.memory_info().rss, len(sessions), time.monotonic() - began
    await asyncio.to_thread(agents.join)
    if agents.exitcode != 0:
        raise SystemExit("the agents failed")
    await asyncio.gather(*playing)
    await server.stop()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": os.getloadavg(),
        "sessions": options.sessions,
        "open_at_the_last_turn": open_now,
        "turns": len(timed.overheads),
        "turns_per_s": round(len(timed.overheads) / seconds, 1),
        "overhead_ms": {f"p{p:g}": round(1e3 * float(np.percentile(timed.overheads, p)), 2) for p in PERCENTILES},
        "memory_per_session_kb": round((largest - before) / options.sessions / 1024, 1),
    }


def _episodes(sessions: OpenSessions, tokenizer: Any) -> AgentEpisodes:
    spec = parse(
        {
            "name": "bench",
            "output": "/nowhere",
            "model": {"path": "/nowhere"},
            "data": {"files": ["/nowhere.jsonl"], "max_prompt_tokens": 4096},
            "rollout": {"agent": {"external": True, "episode_s": 3600}, "max_response_tokens": 32_768},
            "trainer": {"token_budget": 65_536},
        }
    )
    return AgentEpisodes(sessions, Chats(Chat(tokenizer, field="rollout.agent")), spec, asyncio.Semaphore(1))


def run_agents(port: int, sessions: int, turns: int, pause_s: float) -> None:
    """The agents, in their own process. All sessions are claimed before the first turn, and ended after the last."""

    async def all_of_them() -> None:
        ready, done = asyncio.Barrier(sessions), asyncio.Barrier(sessions)
        await asyncio.gather(*(_agent(port, turns, pause_s, ready, done) for _ in range(sessions)))

    asyncio.run(all_of_them())


async def _agent(port: int, turns: int, pause_s: float, ready: asyncio.Barrier, done: asyncio.Barrier) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def idle(waiting: Awaitable[Any]) -> None:
        """Waits. A connection that is idle for long is closed by the server: the agent connects again."""
        nonlocal reader, writer
        began = time.monotonic()
        await waiting
        if time.monotonic() - began > LONGEST_IDLE_S:
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def post(path: str, body: Any, key: str = "") -> Any:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(headers.partition(b"content-length:")[2].partition(b"\r")[0])
        return json.loads(await reader.readexactly(size))

    claimed = await post("/sessions", {})
    await idle(ready.wait())
    path, messages = f"/sessions/{claimed['id']}", list(claimed["row"]["prompt"])
    for turn in range(turns):
        await idle(asyncio.sleep(random.expovariate(1 / pause_s)))
        reply = await post(f"{path}/v1/chat/completions", {"messages": messages}, claimed["key"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"That was guess {turn}. " * 8}]
    await idle(done.wait())
    await post(f"{path}/end", {}, claimed["key"])
    writer.close()


if __name__ == "__main__":
    main()
