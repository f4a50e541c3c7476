"""Episodes that a host plays, with a host of the tests: what of its turns is trained, and what fails."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millrace.contracts.v1 import common_pb2
from millrace.data.chat import Rendered
from millrace.data.row import PromptRow
from millrace.drops import DropReason
from millrace.environments.built_in import Verifiers
from millrace.environments.registry import check
from millrace.errors import InvalidJob
from millrace.spec.environment import Environment
from services.rollout.engine import Completion, Sampling
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt
from services.rollout.episode.slots import Slots
from services.rollout.sessions.hosted import HostedEpisodes
from tests.ports import held_port
from tests.services.rollout.sessions.served import TOKENIZER, Served, served

Play = Callable[[dict[str, Any], httpx.AsyncClient], Awaitable[dict[str, Any]]]
"""What the host does with an episode: from what it is asked to what it tells."""
ROW = PromptRow(3, "game", [{"role": "user", "content": "play"}], "", extra_info={"task": {"idx": 3}})


class Host:
    """A host that plays with `play`, until it is stopped."""

    def __init__(self, port: int, play: Play) -> None:
        self.port, self.play, self.asked = port, play, list[dict[str, Any]]()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        routes = [Route("/health", self._health), Route("/episodes", self._episode, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(60):
            while not self._server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ends it with what it was doing."""
        if self._server is not None and self._serving is not None:
            for listening in self._server.servers:
                listening.close()
            self._server.should_exit = self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._serving

    async def _health(self, request: Request) -> Response:
        return JSONResponse({})

    async def _episode(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked | {"authorization": request.headers.get("authorization", "")})
        headers = {"authorization": f"Bearer {asked['key']}"}
        async with httpx.AsyncClient(base_url=asked["url"], headers=headers, timeout=60) as http:
            return JSONResponse(await self.play(asked, http))


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


async def turn(http: httpx.AsyncClient, tokens: list[int]) -> list[int]:
    """The tokens that the policy samples after `tokens`."""
    reply = await http.post("/inference/v1/generate", json={"token_ids": tokens}, headers={"x-session-id": "other"})
    reply.raise_for_status()
    return list(reply.json()["choices"][0]["token_ids"])


def told(tokens: list[int], *sampled: tuple[int, int], **rest: Any) -> dict[str, Any]:
    branches = [{"tokens": tokens, "sampled": sampled}] if sampled else []
    return {"reward": 0.5, "metrics": {"won": 1.0}, "error": "", "branches": branches, **rest}


async def two_turns(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    """Two turns, and a request between them and one after them that are given up."""
    begun = encoded("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    first = [*begun, *await turn(http, begun)]
    await turn(http, encoded("<|im_start|>user\nsomething else<|im_end|>\n"))
    second = [*first, *encoded("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")]
    whole = [*second, *await turn(http, second)]
    await turn(http, [*whole, *encoded("\n")])
    return told(whole, (len(begun), len(first)), (len(second), len(whole)))


@asynccontextmanager
async def hosted(
    play: Play, token_env: str | None = None, **fields: Any
) -> AsyncIterator[tuple[Host, HostedEpisodes, Served]]:
    async with served(lambda _: "yes") as here:
        with held_port() as port:
            host = Host(port, play)
            options = Verifiers(url=f"http://127.0.0.1:{port}", token_env=token_env)
            environment = Environment(name="verifiers", options=options.model_dump(), **fields)
            agent = here.episodes
            rollout = agent.spec.rollout.model_copy(update={"environment": environment, "agent": None})
            spec = agent.spec.model_copy(update={"rollout": rollout})
            episodes = HostedEpisodes(agent.sessions, agent.chats, spec, options, asyncio.Semaphore(4))
            await host.start()
            try:
                yield host, episodes, here
            finally:
                await host.stop()


async def play_one(
    episodes: HostedEpisodes,
    here: Served,
    most_tokens: int = 2000,
    row: PromptRow = ROW,
    slots: Slots | None = None,
) -> Episode:
    prompt = Prompt(row, Rendered([1, 2]), "")
    with (slots or Slots(1)).episode() as slot:
        return await episodes(here.engine, prompt, Sampling(most_tokens, temperature=0.7), slot)


def test_the_turns_of_the_trace_are_trained_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVIRONMENT_TEST", "secret")

    async def scenario() -> tuple[Episode, dict[str, Any]]:
        options = {"renderer_options": {"tool_parser": "qwen3"}}
        async with hosted(two_turns, "ENVIRONMENT_TEST", **options) as (host, episodes, here):
            episode = await play_one(episodes, here)
            assert len(episodes.sessions) == 0
            return episode, host.asked[0]

    episode, asked = asyncio.run(scenario())
    (trajectory,) = episode.trajectories
    assert trajectory.prompt is not None
    assert TOKENIZER.decode(trajectory.prompt).endswith("go<|im_end|>\n<|im_start|>assistant\n")
    assert [TOKENIZER.decode(each.completion.tokens) for each in trajectory.turns] == ["yes<|im_end|>"] * 2
    assert TOKENIZER.decode(trajectory.turns[1].given).startswith("\n<|im_start|>user\nmore")
    assert episode.scored is not None and (episode.scored.score, episode.scored.details) == (0.5, {"won": 1.0})
    assert asked["task"] == {"idx": 3} and asked["renderer"] == {"name": "default", "tool_parser": "qwen3"}
    assert asked["authorization"] == "Bearer secret" and asked["temperature"] == 0.7


def test_an_episode_has_its_slot_only_while_it_generates() -> None:
    slots, at_work, during = Slots(1), list[int](), list[int]()

    async def play(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
        at_work.append(slots.generating)
        answer = await two_turns(asked, http)
        at_work.append(slots.generating)
        return answer

    async def scenario() -> None:
        async with hosted(play) as (_, episodes, here):
            generate = here.engine.generate

            async def watched(prompt: list[int], sampling: Sampling) -> Completion:
                during.append(slots.generating)
                sample: Completion = await generate(prompt, sampling)
                return sample

            here.engine.generate = watched
            await play_one(episodes, here, slots=slots)

    asyncio.run(scenario())
    assert at_work == [0, 0] and during == [1, 1, 1, 1]
    assert slots.open == slots.generating == 0


def test_a_host_that_ends_costs_the_episode_which_waits_until_it_is_back() -> None:
    reached = asyncio.Event()

    async def once(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
        if reached.is_set():
            return await two_turns(asked, http)
        reached.set()
        await asyncio.Event().wait()
        return {}

    async def scenario() -> Episode:
        async with hosted(once) as (host, episodes, here):
            playing = asyncio.create_task(play_one(episodes, here))
            async with asyncio.timeout(60):
                await reached.wait()
            await host.stop()
            assert not playing.done()
            await host.start()
            return await playing

    episode = asyncio.run(scenario())
    assert episode.account is not None and episode.account.reruns == 1 and len(episode.trajectories[0].turns) == 2


async def altered(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await two_turns(asked, http)
    answer["branches"][0]["tokens"][-2] += 1
    return answer


async def idle(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    return told([])


async def broken(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    await turn(http, [1])
    return told([], reward=None, error="TaskError: no board")


async def unreadable(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    return {"reward": "high"}


async def huge(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    return await two_turns(asked, http) | {"reward": 1e300}


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (altered, "1 turns of the host's trace are not those that the engine sampled"),
        (idle, "the environment asked for no turn"),
        (broken, "TaskError: no board"),
        (unreadable, "cannot be read"),
        (huge, "is not a number to compute with"),
    ],
)
def test_what_cannot_be_trained_drops_the_group_with_the_reason(play: Play, reason: str) -> None:
    async def scenario() -> None:
        async with hosted(play) as (host, episodes, here):
            with pytest.raises(EpisodeFailed) as failed:
                await play_one(episodes, here)
            assert failed.value.drop.reason is DropReason.ENVIRONMENT_FAILED
            assert failed.value.drop.detail.count(reason) == 2 and len(host.asked) == 2

    asyncio.run(scenario())


def test_an_episode_that_fails_at_a_limit_counts() -> None:
    async def until_refused(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
        tokens, sampled = [1], list[tuple[int, int]]()
        while True:
            try:
                more = await turn(http, tokens)
            except httpx.HTTPStatusError as error:
                return told(tokens, *sampled, reward=None, error=f"ProviderError: {error.response.status_code}")
            sampled.append((len(tokens), len(tokens) + len(more)))
            tokens = [*tokens, *more, 5]

    async def scenario() -> None:
        for fields, most_tokens, end in (
            ({"max_turns": 2}, 2000, common_pb2.EPISODE_END_TURNS),
            ({}, 9, common_pb2.EPISODE_END_TOKENS),
        ):
            async with hosted(until_refused, **fields) as (_, episodes, here):
                episode = await play_one(episodes, here, most_tokens)
                assert episode.account is not None and episode.account.end == end
                assert episode.scored is not None and episode.scored.score == 0.0

    asyncio.run(scenario())


def test_an_episode_has_a_deadline_and_needs_a_task() -> None:
    async def hang(asked: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def scenario() -> None:
        async with hosted(hang, episode_s=0.3) as (host, episodes, here):
            with pytest.raises(EpisodeFailed, match=r"took longer than 0.3 s; then the episode took longer"):
                await play_one(episodes, here)
            with pytest.raises(EpisodeFailed, match=r"has no extra_info.task"):
                await play_one(episodes, here, row=dataclasses.replace(ROW, extra_info={}))
            await host.stop()
            with pytest.raises(EpisodeFailed, match=r"did not answer for 0.3 s"):
                await play_one(episodes, here)

        async with hosted(two_turns, "ENVIRONMENT_ABSENT") as (_, episodes, here):
            with pytest.raises(EpisodeFailed, match="no environment variable ENVIRONMENT_ABSENT"):
                await play_one(episodes, here)

    asyncio.run(scenario())


def test_its_options_are_checked_at_submission() -> None:
    check("verifiers", {"url": "http://environments:7790"})
    with pytest.raises(InvalidJob, match=r"options\.url: is missing"):
        check("verifiers", {})
    with pytest.raises(InvalidJob, match="has its tools by itself"):
        check("verifiers", {"url": "http://environments:7790"}, has_servers=True)
