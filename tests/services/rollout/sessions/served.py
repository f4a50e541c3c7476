"""Sessions with a scripted engine behind their real HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from millrace.data.chat import Rendered
from millrace.data.row import PromptRow
from millrace.wire.tls import trusted_by_host
from services.rollout.engine import Completion, Sampling, StopReason
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Episode, Prompt
from services.rollout.episode.slots import Slots
from services.rollout.sessions.episodes import AgentEpisodes
from services.rollout.sessions.open_sessions import OpenSessions, SessionMetrics
from services.rollout.sessions.policy import Chats
from services.rollout.sessions.server import SessionServer
from tests.services.rollout.episode.formats import merging_tokenizer, sampled
from tests.services.rollout.jobs import job_spec

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER: Any = merging_tokenizer(WITH_TOOLS)
ROW = PromptRow(7, "games", [{"role": "user", "content": "hi"}], "37", extra_info={"level": 2})


@dataclass
class Scripted:
    """An engine whose policy is a function of the text before."""

    policy: Callable[[str], str] = lambda _: "ok"
    seen: list[list[int]] = field(default_factory=list)
    """The whole sequence of each turn."""
    asked: list[Sampling] = field(default_factory=list)
    name: str = "scripted"
    capacity: int = 4096

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        text = self.policy(TOKENIZER.decode(prompt_tokens))
        whole = TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False)
        tokens = whole[: sampling.max_response_tokens]
        self.seen.append([*prompt_tokens, *tokens])
        stop = StopReason.END_OF_TURN if len(tokens) == len(whole) else StopReason.LENGTH
        return sampled(tokens, stop)


@dataclass
class Served:
    """Sessions, their server, and an engine."""

    episodes: AgentEpisodes
    engine: Any
    url: str
    http: httpx.AsyncClient

    def play(self, most_tokens: int = 2000, slots: Slots | None = None, **sampling: Any) -> "asyncio.Task[Episode]":
        """An episode that waits for an agent. `slots`: those of its lease."""
        rendered = TOKENIZER.apply_chat_template(ROW.prompt, add_generation_prompt=True, return_dict=False)
        prompt = Prompt(ROW, Rendered(list(rendered)), "")
        wanted = Sampling(most_tokens, **{"temperature": 0.7, **sampling})

        async def one() -> Episode:
            with (slots or Slots(1)).episode() as slot:
                return await self.episodes(self.engine, prompt, wanted, slot)

        return asyncio.create_task(one())

    async def claim(self) -> dict[str, Any]:
        """Claims an episode, as soon as one waits."""
        async with asyncio.timeout(60):
            while (reply := await self.http.post("/sessions")).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert reply.status_code == 201, reply.text
        claimed: dict[str, Any] = reply.json()
        return claimed

    async def post(self, claimed: dict[str, Any], path: str, **body: Any) -> httpx.Response:
        """A request to a session with its key."""
        headers = {"authorization": f"Bearer {claimed['key']}"}
        return await self.http.post(f"/sessions/{claimed['id']}{path}", json=body, headers=headers)

    async def chat(self, claimed: dict[str, Any], *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
        """The answer of the chat completions."""
        reply = await self.post(claimed, "/v1/chat/completions", messages=messages, **body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer


@asynccontextmanager
async def served(
    policy: Callable[[str], str] = lambda _: "ok", metrics: SessionMetrics | None = None, **agent: Any
) -> AsyncIterator[Served]:
    """Sessions of external agents. `agent`: fields of rollout.agent."""
    tools = {"renderer_options": {"tool_parser": "qwen3"}}
    asked = {"external": "command" not in agent, **tools, **agent}
    spec = job_spec(Path("/nowhere"), rollout={"agent": asked})
    assert spec.rollout.agent is not None
    sessions = OpenSessions(metrics)
    server = SessionServer(sessions, "127.0.0.1", 0)
    server.start()
    url = server.url
    chats = Chats(Chat(TOKENIZER, "default", spec.rollout.agent.renderer_options, field="rollout.agent"))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=trusted_by_host(url)) as http:
            yield Served(AgentEpisodes(sessions, chats, spec, asyncio.Semaphore(2)), Scripted(policy), url, http)
    finally:
        await server.stop()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
