import asyncio
import json
import random
from itertools import islice

import pytest

from millrace.demo.tasks import Hunt, TreasureHunt
from millrace.demo.tokenizer import byte_tokenizer
from services.rollout.episode.chat import Chat

HUNT = TreasureHunt()
CASES = list(islice(HUNT.cases(random.Random(7)), 50))


def played(case: str, turns: list[tuple[str, str]]) -> float:
    """The reward of a conversation, whose tool has to say what the environment's says. Calls are read as in a job."""
    tokenizer = byte_tokenizer(HUNT.tokens)
    chat = Chat(tokenizer, "default", {"tool_parser": "glm"})
    row = HUNT.row(0, case)

    async def play() -> float:
        environment = Hunt()
        given = {"index": 0, "data_source": "d", "prompt": row.prompt, "extra_info": row.extra_info}
        messages = await environment.reset({**given, "ground_truth": row.ground_truth})  # type: ignore[typeddict-item]
        assert [(each["role"], each["content"]) for each in messages] == turns[:1]
        for (_, text), (role, after) in zip(turns[1::2], [*turns[2::2], ("", "")], strict=True):
            message, _ = chat.read([], tokenizer.encode(text), ended=False)
            if role == "tool":
                ((call),) = message["tool_calls"]
                assert await environment.open(**json.loads(call["function"]["arguments"])) == after
        _, reward, done = await environment.step(message)
        assert done and reward is not None
        return reward

    return asyncio.run(play())


def test_what_the_model_is_warmed_with_is_what_the_environment_does() -> None:
    rng = random.Random(1)
    assert all(played(case, HUNT.conversation(case, rng, right=True)) == 1.0 for case in CASES)
    wrong = [played(case, HUNT.conversation(case, rng, right=False)) for case in CASES]
    assert sum(wrong) == 0.0
    assert {len(case.split()[0]) for case in CASES} == {1, 2, 3}


@pytest.mark.parametrize(("place", "there"), [("g", "c"), ("c", "fab"), ("x", "empty"), ("", "empty"), ("gc", "empty")])
def test_a_place_holds_the_next_one_or_the_word(place: str, there: str) -> None:
    environment = Hunt()
    row = {"index": 0, "data_source": "d", "prompt": [], "ground_truth": "fab", "extra_info": {"places": "gc"}}
    asyncio.run(environment.reset(row))  # type: ignore[arg-type]
    assert asyncio.run(environment.open(place)) == there
