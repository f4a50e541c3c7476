"""The clients of OpenAI and Anthropic, as they are installed, against a session."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from services.rollout.dialects import requests
from services.rollout.episode.episode import Episode
from tests.later import Later
from tests.services.rollout.sessions.served import Served, served
from tests.services.rollout.sessions.test_sessions import ADD, CALL, trained

openai: Any = Later("openai")
anthropic: Any = Later("anthropic")

CLIENT: dict[str, Any] = {"max_retries": 0, "timeout": 120}


def policy(text: str) -> str:
    """Thinks and calls a tool, then says what it got."""
    turns = text.count("<|im_start|>assistant")
    return f"<think>hm</think>let me see{CALL}" if turns == 1 else f"so it is {turns}"


async def play(use: Callable[[dict[str, Any]], Any]) -> tuple[Served, Episode]:
    """An episode of an agent that is given what it claimed."""
    async with served(policy) as here:
        playing, claimed = here.play(), await here.claim()
        await use(claimed)
        await here.post(claimed, "/end")
        return here, await playing


def whole(played: tuple[Served, Episode]) -> None:
    """One trajectory, of the very tokens that the engine saw."""
    here, episode = played
    assert trained(episode) == here.engine.seen
    assert [len(one.turns) for one in episode.trajectories] == [2]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_completions(stream: bool) -> None:
    async def agent(claimed: dict[str, Any]) -> None:
        async with openai.AsyncOpenAI(base_url=claimed["openai_base_url"], api_key=claimed["key"], **CLIENT) as client:
            (model,) = [each.id async for each in await client.models.list()]
            messages: Any = [{"role": "user", "content": "hi"}]
            asked: Any = {"model": model, "tools": [ADD], "temperature": 0.2, "logprobs": True}
            for _ in range(2):
                if stream:
                    message, usage = await gathered(client, messages, asked)
                    assert usage is not None and usage.completion_tokens > 0
                else:
                    reply = await client.chat.completions.create(messages=messages, **asked)
                    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content
                    message = reply.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    assert json.loads(call["function"]["arguments"]) == {"a": 1}
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "2"})
            assert message["content"] == "so it is 2"

    whole(asyncio.run(play(agent)))


async def gathered(client: Any, messages: Any, asked: Any) -> tuple[dict[str, Any], Any]:
    """The message and the usage of a stream, put together as agents do it."""
    text, calls, usage = "", list[dict[str, Any]](), None
    stream = await client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **asked
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}, usage


@pytest.mark.parametrize("manner", ["whole input", "previous response", "stream"])
def test_openai_responses(manner: str) -> None:
    async def agent(claimed: dict[str, Any]) -> None:
        function = ADD["function"]
        assert isinstance(function, dict)
        tool: Any = {"type": "function", "strict": False, **function}
        async with openai.AsyncOpenAI(base_url=claimed["openai_base_url"], api_key=claimed["key"], **CLIENT) as client:
            asked: Any = {"model": "any", "instructions": "be brief", "tools": [tool]}
            items: Any = [{"role": "user", "content": "hi"}]
            if manner == "stream":
                async with client.responses.stream(input=items, **asked) as events:
                    kinds = [event.type async for event in events]
                    first = await events.get_final_response()
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            else:
                first = await client.responses.create(input=items, **asked)
            (call,) = [item for item in first.output if item.type == "function_call"]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            if manner == "previous response":
                asked["previous_response_id"], items = first.id, [result]
            else:
                items = [*items, *(item.model_dump(exclude_none=True) for item in first.output), result]
            second = await client.responses.create(input=items, **asked)
            assert second.output_text == "so it is 2" and second.status == "completed"
            with pytest.raises(openai.BadRequestError, match="no such response"):
                await client.responses.create(input="x", model="any", previous_response_id="resp_0")

    whole(asyncio.run(play(agent)))


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(stream: bool) -> None:
    async def agent(claimed: dict[str, Any]) -> None:
        tool: Any = {"name": "add", "description": "", "input_schema": {"type": "object", "properties": {}}}
        async with anthropic.AsyncAnthropic(
            base_url=claimed["anthropic_base_url"], api_key=claimed["key"], **CLIENT
        ) as client:
            messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
            asked: Any = {"model": "any", "max_tokens": 500, "system": "be brief", "tools": [tool]}
            reasons = []
            for _ in range(2):
                if stream:
                    async with client.messages.stream(messages=messages, **asked) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(messages=messages, **asked)
                reasons.append(reply.stop_reason)
                messages.append({"role": "assistant", "content": reply.content})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
                    for block in reply.content
                    if block.type == "tool_use" and block.input == {"a": 1}
                ]
                messages.append({"role": "user", "content": results})
            assert reasons == ["tool_use", "end_turn"]
            (text,) = reply.content
            assert text.type == "text" and text.text == "so it is 2"

    whole(asyncio.run(play(agent)))


def test_errors_are_the_clients_own() -> None:
    async def scenario() -> None:
        async with served() as here:
            playing, claimed = here.play(most_tokens=5), await here.claim()
            url, key = claimed["url"], claimed["key"]
            messages: Any = [{"role": "user", "content": "hi"}]
            async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", **CLIENT) as wrong:
                with pytest.raises(anthropic.AuthenticationError, match="the key is not that of"):
                    await wrong.messages.create(model="any", max_tokens=5, messages=messages)
            async with anthropic.AsyncAnthropic(base_url=url, api_key=key, **CLIENT) as client:
                counted = await client.messages.count_tokens(model="any", messages=messages)
                assert counted.input_tokens > 0
                with pytest.raises(anthropic.BadRequestError, match="a call that is forced"):
                    choice: Any = {"type": "any"}
                    await client.messages.create(model="any", max_tokens=5, messages=messages, tool_choice=choice)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **CLIENT) as other:
                with pytest.raises(openai.BadRequestError, match="one turn at a time"):
                    await other.chat.completions.create(model="any", messages=messages, n=2)
                await here.post(claimed, "/end")
                with pytest.raises(openai.NotFoundError):
                    await other.chat.completions.create(model="any", messages=messages)
            playing.cancel()
            await asyncio.wait([playing])

    asyncio.run(scenario())


def test_a_stream_that_waits_long_is_kept_alive_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[str]:
        async with served(episode_s=2.0) as here:
            monkeypatch.setattr(requests, "STATUS_S", 0.01)
            monkeypatch.setattr(requests, "PING_S", 0.05)

            async def hang(*_: Any) -> Any:
                await asyncio.Event().wait()

            here.engine.generate = hang
            playing, claimed = here.play(), await here.claim()
            headers = {"x-api-key": claimed["key"]}
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            path = f"/sessions/{claimed['id']}/v1/chat/completions"
            async with here.http.stream("POST", path, json=body, headers=headers) as reply:
                assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
                lines = [line async for line in reply.aiter_lines() if line]
            playing.cancel()
            await asyncio.wait([playing])
            return lines

    *pings, last = asyncio.run(scenario())
    assert set(pings) == {": the turn is being sampled"}
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "session_ended"
