"""Sessions over HTTP: what is trained, what is refused, and how they end."""

import asyncio
from typing import Any

import pytest

from millrace.contracts.v1 import common_pb2
from millrace.drops import DropReason
from services.rollout.engine import Completion, Sampling
from services.rollout.episode.episode import Episode, EpisodeFailed
from services.rollout.episode.slots import Slots
from tests.services.rollout.coordinator import until
from tests.services.rollout.sessions.served import ROW, TOKENIZER, Served, served, user

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def trained(episode: Episode) -> list[list[int]]:
    """The sequence up to the end of each turn."""
    found = []
    for trajectory in episode.trajectories:
        tokens = list(served_prompt(trajectory.prompt))
        for turn in trajectory.turns:
            tokens += [*turn.given.tolist(), *turn.completion.tokens.tolist()]
            found.append(list(tokens))
    return found


def served_prompt(prompt: Any) -> list[int]:
    if prompt is not None:
        return list(prompt.tolist())
    return list(TOKENIZER.apply_chat_template(ROW.prompt, add_generation_prompt=True, return_dict=False))


def test_a_whole_history_extends_the_tokens_and_a_rewritten_one_forks() -> None:
    def policy(text: str) -> str:
        return CALL if text.count("<|im_start|>assistant") == 1 else f"turn {text.count('assistant')}"

    async def scenario() -> tuple[Served, Episode]:
        async with served(policy) as here:
            playing = here.play()
            claimed = await here.claim()
            assert claimed["row"] == {
                "index": 7,
                "data_source": "games",
                "prompt": ROW.prompt,
                "ground_truth": "37",
                "extra_info": {"level": 2},
            }
            first = await here.chat(claimed, user("hi"), tools=[ADD])
            choice = first["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
            asked = [user("hi"), choice["message"]]
            result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "2"}]}
            second = await here.chat(claimed, *asked, result, tools=[ADD])
            told = {"role": "assistant", "content": second["choices"][0]["message"]["content"]}
            await here.chat(claimed, *asked, result, told, user("more"), tools=[ADD])
            again = await here.chat(claimed, *asked, result, tools=[ADD])
            assert again["choices"][0]["message"]["content"] == told["content"]
            await here.chat(claimed, user("in short"), tools=[ADD])
            assert (await here.post(claimed, "/reward", reward=0.5, turn=1)).status_code == 200
            assert (await here.post(claimed, "/end", reward=2.0)).json() == {"id": claimed["id"], "turns": 5}
            return here, await playing

    here, episode = asyncio.run(scenario())
    assert sorted(trained(episode)) == sorted(here.engine.seen) and len(here.engine.seen) == 5
    assert [len(one.turns) for one in episode.trajectories] == [3, 1, 1]
    assert [turn.reward for one in episode.trajectories for turn in one.turns] == [0.0, 0.5, 0.0, 0.0, 0.0]
    assert episode.scored is not None and episode.scored.score == 2.0
    account = episode.messages()[-1].account
    assert (account.end, account.tool_calls) == (common_pb2.EPISODE_END_DONE, 1) and account.tool_s > 0.0
    resent = episode.trajectories[1].prompt
    assert resent is not None and resent.tolist() == here.engine.seen[3][: len(resent)]


def test_parallel_requests_have_their_own_trajectories() -> None:
    async def scenario() -> tuple[Served, Episode]:
        async with served() as here:
            playing, claimed = here.play(), await here.claim()
            agents = [[user("hi")], [user("hi")], [{"role": "developer", "content": "help"}, user("hi")]]
            replies = await asyncio.gather(*(here.chat(claimed, *messages) for messages in agents))
            follow = [
                here.chat(claimed, *messages, reply["choices"][0]["message"], user("on"))
                for messages, reply in zip(agents, replies, strict=True)
            ]
            await asyncio.gather(*follow)
            await here.post(claimed, "/end")
            return here, await playing

    here, episode = asyncio.run(scenario())
    assert sorted(trained(episode)) == sorted(here.engine.seen)
    assert [len(one.turns) for one in episode.trajectories] == [2, 2, 2] and episode.scored is None


def test_tokens_in_tokens_out() -> None:
    async def scenario() -> tuple[Served, Episode, list[dict[str, Any]]]:
        async with served() as here:
            playing, claimed = here.play(), await here.claim()
            headers = {"x-session-id": claimed["id"], "authorization": f"Bearer {claimed['key']}"}
            prompt, replies = TOKENIZER.encode("a.\nb"), []
            for more in ("\nuser", "!\n"):
                body = {"token_ids": prompt, "sampling_params": {"max_tokens": 50, "logprobs": 1}, "priority": 0}
                reply = await here.http.post("/inference/v1/generate", json=body, headers=headers)
                replies.append(reply.json()["choices"][0])
                prompt = [*prompt, *replies[-1]["token_ids"], *TOKENIZER.encode(more)]
            body = {"token_ids": TOKENIZER.encode("other")}
            await here.http.post(f"/sessions/{claimed['id']}/inference/v1/generate", json=body, headers=headers)
            wrong = await here.http.post("/inference/v1/generate", json={"token_ids": [99_999]}, headers=headers)
            assert wrong.status_code == 400 and "token_ids: 99999: the model's tokens are" in wrong.text
            await here.post(claimed, "/end")
            return here, await playing, replies

    here, episode, replies = asyncio.run(scenario())
    assert sorted(trained(episode)) == sorted(here.engine.seen)
    assert [len(one.turns) for one in episode.trajectories] == [2, 1]
    assert replies[0]["finish_reason"] == "stop" and len(replies[0]["logprobs"]["content"]) == len(
        replies[0]["token_ids"]
    )
    first = replies[0]["token_ids"][0]
    assert replies[0]["logprobs"]["content"][0] == {"token": f"token_id:{first}", "token_id": first, "logprob": -0.5}


def test_what_is_refused_is_told_as_the_clients_expect_it() -> None:
    async def scenario() -> None:
        async with served(max_turns=1) as here:
            empty = await here.http.post("/sessions")
            assert empty.status_code == 429 and empty.headers["retry-after"] == "2"
            assert empty.json()["error"]["code"] == "no_episode_waits"
            page = await here.http.post("/sessions", headers={"origin": "http://evil.example"})
            assert page.status_code == 401
            playing, claimed = here.play(), await here.claim()
            other = {**claimed, "key": "wrong"}
            assert (await here.post(other, "/v1/chat/completions", messages=[user("hi")])).status_code == 401
            assert (await here.post({**claimed, "id": "session-0"}, "/end")).status_code == 404
            for body, told in (
                ({"messages": []}, "messages: []: "),
                ({"messages": [{"role": "robot", "content": "x"}]}, 'messages.0.role: "robot": there is no such role.'),
                ({"messages": [user("hi")], "n": 2}, "n: 2: a request samples one turn at a time."),
                ({"messages": [user("hi")], "tool_choice": "required"}, "would not be sampled"),
                ({"messages": [user("hi")], "response_format": {"type": "json_object"}}, "response_format.type"),
                ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is not text"),
            ):
                reply = await here.post(claimed, "/v1/chat/completions", **body)
                error = reply.json()["error"]
                assert reply.status_code == 400 and told in error["message"] and " Fix: " in error["message"], error
                assert error["type"] == "invalid_request_error"
            late = await here.post(claimed, "/reward", reward=1.0, turn=0)
            assert late.status_code == 400 and "there is no turn yet" in late.text
            assert (await here.post(claimed, "/reward", reward="nan")).status_code == 400
            await here.chat(claimed, user("hi"), temperature=0.0, max_tokens=2, stop=["x"])
            assert (here.engine.asked[0].temperature, here.engine.asked[0].stop) == (0.7, ("x",))
            assert here.engine.asked[0].max_response_tokens == 2
            full = await here.post(claimed, "/v1/chat/completions", messages=[user("on")])
            assert full.status_code == 410 and full.json()["error"]["code"] == "session_ended"
            await here.post(claimed, "/end")
            episode = await playing
            assert episode.messages()[-1].account.end == common_pb2.EPISODE_END_TURNS
            assert (await here.post(claimed, "/end")).status_code == 404

    asyncio.run(scenario())


def test_a_conversation_without_room_is_told_as_too_long() -> None:
    async def scenario() -> None:
        async with served(lambda _: "x" * 100) as here:
            playing, claimed = here.play(most_tokens=20), await here.claim()
            cut = await here.chat(claimed, user("hi"))
            assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 20
            reply = await here.post(
                claimed, "/v1/chat/completions", messages=[user("hi"), cut["choices"][0]["message"], user("on")]
            )
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
            await here.post(claimed, "/end")
            assert (await playing).messages()[-1].account.end == common_pb2.EPISODE_END_TOKENS

    asyncio.run(scenario())


def test_an_abandoned_session_is_offered_again_and_then_dropped() -> None:
    """What it has in the engine is aborted."""

    async def scenario() -> None:
        async with served(episode_s=0.3) as here:
            aborted = asyncio.Event()

            async def generate(prompt: list[int], sampling: Sampling) -> Completion:
                try:
                    await asyncio.Event().wait()
                finally:
                    aborted.set()
                raise AssertionError

            here.engine.generate = generate
            playing = here.play()
            first = await here.claim()
            waiting = await here.post(first, "/v1/chat/completions", messages=[user("hi")])
            assert waiting.status_code == 410 and aborted.is_set()
            second = await here.claim()
            assert second["id"] != first["id"]
            with pytest.raises(EpisodeFailed) as failed:
                await playing
            assert failed.value.drop.reason is DropReason.ENVIRONMENT_FAILED
            assert failed.value.drop.detail.count("the episode took longer than 0.3 s") == 2
            assert len(here.episodes.sessions) == 0

    asyncio.run(scenario())


def test_a_session_has_its_slot_until_it_is_claimed_and_while_it_generates() -> None:
    async def scenario() -> None:
        async with served() as here:
            slots, generate, during = Slots(1), here.engine.generate, list[int]()

            async def watched(prompt: list[int], sampling: Sampling) -> Completion:
                during.append(slots.generating)
                sample: Completion = await generate(prompt, sampling)
                return sample

            here.engine.generate = watched
            playing = here.play(slots=slots)
            await until(lambda: here.episodes.sessions.waiting == 1)
            assert slots.generating == 1, "nobody has claimed it yet"
            claimed = await here.claim()
            await until(lambda: slots.generating == 0)
            for _ in range(2):
                await here.chat(claimed, user("hi"))
                assert slots.generating == 0, "the agent is at work"
            await here.post(claimed, "/end")
            await playing
            assert during == [1, 1] and slots.open == slots.generating == 0

    asyncio.run(scenario())


def test_a_client_that_goes_away_frees_the_engine_and_may_ask_again() -> None:
    async def scenario() -> tuple[Served, Episode]:
        async with served() as here:
            begun, aborted, generate = asyncio.Event(), asyncio.Event(), here.engine.generate

            async def hang(prompt: list[int], sampling: Sampling) -> Completion:
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    aborted.set()
                raise AssertionError

            here.engine.generate = hang
            playing, claimed = here.play(), await here.claim()
            asking = asyncio.create_task(here.chat(claimed, user("hi")))
            await begun.wait()
            asking.cancel()
            async with asyncio.timeout(60):
                await aborted.wait()
            here.engine.generate = generate
            await here.chat(claimed, user("hi"))
            await here.post(claimed, "/end")
            return here, await playing

    here, episode = asyncio.run(scenario())
    assert trained(episode) == here.engine.seen and len(episode.trajectories) == 1


def test_a_lease_that_is_lost_ends_its_sessions() -> None:
    async def scenario() -> None:
        async with served() as here:
            playing, claimed, other = here.play(), await here.claim(), here.play()
            playing.cancel()
            other.cancel()
            await asyncio.wait([playing, other])
            assert len(here.episodes.sessions) == here.episodes.sessions.waiting == 0
            assert (await here.post(claimed, "/v1/chat/completions", messages=[user("hi")])).status_code == 404

    asyncio.run(scenario())
