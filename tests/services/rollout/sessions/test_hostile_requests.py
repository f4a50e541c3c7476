"""What one session's key can cost its replica: text, requests at a time, memory of what was refused, odd characters."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from services.rollout.dialects import requests
from services.rollout.episode.chat import Chat
from services.rollout.sessions import policy
from services.rollout.sessions.session import MOST_BODIES, Session
from tests.services.rollout.coordinator import until
from tests.services.rollout.sessions.served import TOKENIZER, Served, served, user

HALF_A_PAIR = "\ud800"
CHAT = "/v1/chat/completions"


def session_of(here: Served, claimed: dict[str, Any]) -> Session:
    return here.episodes.sessions.find(claimed["id"], claimed["key"])


def test_more_text_than_tokens_can_stand_for_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MARGIN", 1000)
    longest = max(len(token.encode()) for token in TOKENIZER.get_vocab())
    rendered: list[int] = []
    render = Chat.render

    def counted(self: Chat, messages: Any) -> list[int]:
        rendered.append(sum(len(each["content"]) for each in messages))
        return render(self, messages)

    monkeypatch.setattr(Chat, "render", counted)

    async def scenario() -> None:
        async with served() as here:
            playing = here.play()
            claimed = await here.claim()
            session = session_of(here, claimed)
            most = session.policy.largest_text(0)
            assert most == 1000 + session.policy.longest * longest
            for asked in ({"messages": [user("a" * most)]}, {"messages": [user("b")], "tools": [{"x": "a" * most}]}):
                reply = await here.post(claimed, CHAT, **asked)
                assert reply.status_code == 400, reply.text
                assert reply.json()["error"]["code"] == "context_length_exceeded"
                assert f"at most {session.policy.longest} tokens" in reply.json()["error"]["message"]
            counting = await here.post(claimed, "/v1/messages/count_tokens", messages=[user("a" * most)], max_tokens=9)
            assert counting.status_code == 400
            assert rendered == []
            body = await here.post(claimed, CHAT, messages=[user("a" * 4 * most)])
            assert body.status_code == 413 and f"more than {3 * most} bytes" in body.json()["error"]["message"]
            assert (await here.chat(claimed, user("hi")))["choices"][0]["message"]["content"] == "ok"
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())


def test_what_was_refused_takes_no_memory() -> None:
    async def scenario() -> None:
        async with served() as here:
            playing = here.play(most_tokens=20)
            claimed = await here.claim()
            session = session_of(here, claimed)
            for number in range(3):
                long = f"{number}" + "a b c d e " * 1000
                assert (await here.post(claimed, CHAT, messages=[user(long)])).status_code == 400
                tokens = [number, *[5] * session.policy.longest]
                assert (await here.post(claimed, "/inference/v1/generate", token_ids=tokens)).status_code == 400
            assert not session._conversations and not session._sequences
            await here.chat(claimed, user("hi"))
            assert len(session._conversations) == 1
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())


def test_a_session_has_as_many_requests_in_progress_as_turns_left() -> None:
    async def scenario() -> None:
        async with served(max_turns=2) as here:
            playing = here.play()
            claimed = await here.claim()
            session, held = session_of(here, claimed), asyncio.Event()
            generate = here.engine.generate

            async def waits(prompt: Any, sampling: Any) -> Any:
                await held.wait()
                return await generate(prompt, sampling)

            here.engine.generate = waits
            first = [asyncio.create_task(here.post(claimed, CHAT, messages=[user(text)])) for text in "ab"]
            await until(lambda: session._requests == 2)
            assert (await here.post(claimed, CHAT, messages=[user("c")])).status_code == 429
            held.set()
            assert [(await each).status_code for each in first] == [200, 200]
            assert (await here.post(claimed, CHAT, messages=[user("c")])).status_code == 410
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())


def test_a_session_sends_only_so_many_bodies_at_once() -> None:
    async def scenario() -> None:
        async with served() as here:
            playing = here.play()
            claimed = await here.claim()
            session, whole = session_of(here, claimed), asyncio.Event()

            async def slowly() -> Any:
                yield b"{"
                await whole.wait()
                yield b"}"

            headers = {"authorization": f"Bearer {claimed['key']}"}
            path = f"/sessions/{claimed['id']}{CHAT}"
            sending = [here.http.post(path, content=slowly(), headers=headers) for _ in range(MOST_BODIES)]
            tasks = [asyncio.create_task(each) for each in sending]
            await until(lambda: session._bodies == MOST_BODIES)
            assert (await here.post(claimed, CHAT, messages=[user("a")])).status_code == 429
            whole.set()
            assert {(await each).status_code for each in tasks} == {400}
            await here.chat(claimed, user("a"))
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())


def test_large_texts_are_rendered_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.sessions.session.LARGE", 3000)
    at_once, most = 0, 0
    render = Chat.render

    def counted(self: Chat, messages: Any) -> list[int]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1
        return render(self, messages)

    monkeypatch.setattr(Chat, "render", counted)

    async def scenario() -> None:
        async with served() as here:
            playing = here.play()
            claimed = await here.claim()
            texts = [f"{number}" + "a b " * 1000 for number in range(8)]
            await asyncio.gather(*(here.post(claimed, CHAT, messages=[user(text)]) for text in texts))
            await here.chat(claimed, user("hi"))
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())
    assert 1 <= most <= policy.MOST_LARGE


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"messages": [user(HALF_A_PAIR)]}).encode(),
        json.dumps({"messages": [user("a")], "n": HALF_A_PAIR}).encode(),
        json.dumps({"messages": [user("a")], HALF_A_PAIR: 1, "stop": [HALF_A_PAIR]}).upper().lower().encode(),
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_half_of_a_surrogate_pair_and_deep_json_are_refused(body: bytes) -> None:
    async def scenario() -> None:
        async with served() as here:
            playing = here.play()
            claimed = await here.claim()
            for path in (CHAT, "/v1/responses", "/v1/messages", "/reward"):
                headers = {"authorization": f"Bearer {claimed['key']}"}
                reply: httpx.Response = await here.http.post(
                    f"/sessions/{claimed['id']}{path}", content=body, headers=headers
                )
                assert reply.status_code == 400, (path, reply.status_code, reply.text)
            await here.chat(claimed, user("😀"))
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())


def test_a_call_with_half_of_a_surrogate_pair_is_told() -> None:
    def calls(text: str) -> str:
        return '<tool_call>{"name": "add", "arguments": {"a": "\\ud800", "b": "ä"}}</tool_call>'

    async def scenario() -> None:
        async with served(calls) as here:
            playing = here.play()
            claimed = await here.claim()
            tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
            answer = await here.chat(claimed, user("a"), tools=[tool])
            told = answer["choices"][0]["message"]
            assert json.loads(told["tool_calls"][0]["function"]["arguments"]) == {"a": HALF_A_PAIR, "b": "ä"}
            again = await here.post(claimed, CHAT, messages=[user("a"), told, user("b")], tools=[tool])
            assert again.status_code == 200
            await here.post(claimed, "/end")
            await playing

    asyncio.run(scenario())


def test_arguments_that_are_half_of_a_pair_stay_text() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        requests.read_json('{"a": "\\ud800"}')
    assert requests.read_json('{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
