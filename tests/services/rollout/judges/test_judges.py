"""Judges over real HTTP: what they are told, how their replies are read, and every way in which they may fail."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from millrace.data.row import PromptRow
from millrace.errors import InvalidJob
from millrace.rewards import Scope
from millrace.spec.pool import Judge, JudgeTerm
from services.rollout.judges import client
from services.rollout.judges.scorer import JudgeScorer
from services.rollout.scoring.scored import Answer, Scored
from tests.services.rollout.judges.judge_server import CLOSES, HANGS, Failure, JudgeServer, Reply, said, serving

ROW = PromptRow(0, "d", [{"role": "user", "content": "Say {{answer}}."}], {"word": "ä"}, {})
SHOWN = "{{ answer }}"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.05)


def scorer(server: JudgeServer, *, scope: Scope = "answer", **fields: Any) -> JudgeScorer:
    judge = Judge(url=server.url, model="judge-1", **{"prompt": SHOWN, "timeout_s": 60.0, **fields})
    return JudgeScorer(JudgeTerm(judge, "quality", 1.0, scope, "reward.functions.0.judge"))


def asked(
    reply: Reply, act: Callable[[JudgeServer, JudgeScorer], Awaitable[Any]], *, scope: Scope = "answer", **fields: Any
) -> Any:
    async def whole() -> Any:
        async with serving(reply) as server, asyncio.timeout(120):
            asking = scorer(server, scope=scope, **fields)
            try:
                return await act(server, asking)
            finally:
                await asking.close()

    return asyncio.run(whole())


def scored(reply: Reply, *answers: str, scope: Scope = "answer", **fields: Any) -> list[Scored]:
    return asked(reply, lambda _, each: each.score(ROW, [Answer(a, f"<{a}>") for a in answers]), scope=scope, **fields)


def test_each_answer_gets_the_last_number_that_the_judge_says() -> None:
    found = scored(lambda body: f"Score: 1. On reflection, score = {len(said(body))}.5", "ab", "abcd")
    assert [each.score for each in found] == [2.5, 4.5]
    assert found[0].details == {"quality_reply": "Score: 1. On reflection, score = 2.5"}
    assert found[0].seconds > 0


def test_a_judge_is_told_what_its_template_names_and_nothing_is_filled_in_twice() -> None:
    text = "P: {{prompt}} A: {{answer}} T: {{ground_truth}} C: {{conversation}} {not} {{{answer}}}"

    async def act(server: JudgeServer, asking: JudgeScorer) -> list[dict[str, Any]]:
        await asking.score(ROW, [Answer("{{prompt}}", "turns")])
        return server.asked

    (body,) = asked(
        lambda _: "score 1", act, prompt=text, system="Be strict.", options={"temperature": 0.5, "max_tokens": 9}
    )
    told = 'P: Say {{answer}}. A: {{prompt}} T: {"word": "ä"} C: turns {not} {{{prompt}}}'
    assert body["messages"] == [{"role": "system", "content": "Be strict."}, {"role": "user", "content": told}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-1", 0.5, 9)


def test_all_answers_to_a_prompt_may_be_judged_at_once() -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[list[Scored], str]:
        return await asking.score(ROW, [Answer("x"), Answer("y")]), said(server.asked[0])

    fields: dict[str, Any] = {"scope": "group", "prompt": "{{answers}}", "scale": [0, 10]}
    pattern = r"(?im)^score:? ([\d.]+)$"
    found, told = asked(lambda _: "Score 1: no.\nscore: 5\nSCORE 2.5", act, pattern=pattern, **fields)
    assert told == "Answer 1:\nx\n\nAnswer 2:\ny"
    assert [each.score for each in found] == [0.5, 0.25]
    (one, _) = scored(lambda _: 'Here: {"score": [1]}', "x", "y", json_field="score", retries=0, **fields)
    assert one.failure == 'gave no score: there are 1 scores for 2 answers in "Here: {\\"score\\": [1]}"'


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 3}', 3.0),
        ('```json\n{"why": {"score": 1}, "score": "4.5"}\n```', 4.5),
        ('{"score": 1} no: {"score": true}', 1.0),
        ("{{{" * 10 + '{"score": 2}', 2.0),
    ],
)
def test_scores_in_json_are_found_wherever_they_lie(reply: str, score: float) -> None:
    (found,) = scored(lambda _: reply, "a", json_field="score")
    assert found.score == score


@pytest.mark.parametrize(
    "reply", ["I cannot say.", "", "score: 11", '{"score": NaN}', '{"score": null}', "{" * 100_000]
)
def test_a_reply_without_a_score_is_asked_for_again_a_bounded_number_of_times(reply: str) -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[list[Scored], int]:
        return await asking.score(ROW, [Answer("a")]), len(server.asked)

    for field in (None, "score"):
        (found,), count = asked(lambda _: reply, act, json_field=field, retries=1, scale=[1, 10])
        assert found.score is None and found.failure is not None and found.failure.startswith("gave no score: ")
        assert count == 2
    replies = iter(["no idea", "score 10"])
    (found,) = scored(lambda _: next(replies), "a", retries=1, scale=[1, 10])
    assert found.score == 1.0


def test_a_pattern_that_takes_too_long_is_given_up() -> None:
    (found,) = scored(lambda _: "a" * 5000 + "!", "x", pattern=r"(a|aa)+$", retries=0)
    assert found.failure is not None and "took more than 1 s" in found.failure


@pytest.mark.parametrize("failure", [Failure(500), Failure(503), Failure(429), Failure(408), CLOSES])
def test_a_judge_that_fails_for_a_while_is_asked_until_it_answers(failure: Failure) -> None:
    replies = itertools.chain([failure] * 2, itertools.repeat("score 1"))

    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[list[Scored], dict[str, int], object]:
        return await asking.score(ROW, [Answer("a")]), asking.client.asked, asking.client.outage

    (found,), counts, outage = asked(lambda _: next(replies), act)
    assert (found.score, found.failure, outage) == (1.0, None, None)
    assert counts == {"answered": 1, "repeated": 2, "refused": 0, "given_up": 0}


def test_a_judge_that_hangs_is_asked_again_after_the_timeout() -> None:
    replies = itertools.chain([HANGS], itertools.repeat("score 1"))
    (found,) = scored(lambda _: next(replies), "a", timeout_s=1.0)
    assert found.score == 1.0


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_honoured(date: bool) -> None:
    times: list[float] = []

    def reply(_: object) -> str | Failure:
        times.append(time.monotonic())
        told = formatdate(time.time() + 3, usegmt=True) if date else "2"
        return "score 1" if len(times) > 1 else Failure(429, {"Retry-After": told})

    (found,) = scored(reply, "a")
    assert found.score == 1.0 and times[1] - times[0] >= 1.9


def test_scores_wait_while_the_judge_is_down_and_go_on_by_themselves() -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[list[Scored], str, int]:
        scoring = asyncio.create_task(asking.score(ROW, [Answer(each) for each in "abcde"]))
        for _ in range(3):  # at most two are asked at once, so the first has failed
            await server.arrived.get()
        assert asking.client.outage is not None and not scoring.done()
        why, waiting = asking.client.outage.why, asking.client.waiting
        await server.down()
        server.reply = lambda _: "score 1"
        await asyncio.sleep(1.0)  # requests in this time find nobody
        await server.up()
        found = await scoring
        assert asking.client.outage is None and asking.client.waiting == 0
        return found, why, waiting

    found, why, waiting = asked(lambda _: Failure(503), act, max_concurrent=2)
    assert [each.score for each in found] == [1.0] * 5
    assert waiting == 5 and why.startswith("status 503")


def test_after_the_deadline_all_that_wait_are_given_up_together() -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[list[Scored], float, dict[str, int]]:
        await server.down()
        began = time.monotonic()
        found = await asking.score(ROW, [Answer(str(n)) for n in range(40)])
        return found, time.monotonic() - began, asking.client.asked

    found, seconds, counts = asked(lambda _: "score 1", act, max_concurrent=1, deadline_s=2.0)
    assert all(each.failure is not None and each.failure.startswith("did not answer for 2 s: ") for each in found)
    assert counts["given_up"] == 40
    assert seconds < 40, "they wait for the judge, not for each other"


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (Failure(401, {}, "bad key"), "refused the request with status 401: bad key"),
        (Failure(404, {}, ""), "refused the request with status 404: nothing"),
        (Failure(307, {"Location": "/other"}), "refused the request with status 307"),
        (Failure(200, {}, "<html>"), "is no OpenAI-compatible endpoint: it answered <html>"),
        (Failure(200, {}, '{"choices": []}'), "is no OpenAI-compatible endpoint"),
    ],
)
def test_what_asking_again_would_not_change_fails_at_once(failure: Failure, why: str) -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[list[Scored], int]:
        return await asking.score(ROW, [Answer("a")]), len(server.asked)

    (found,), count = asked(lambda _: failure, act)
    assert found.failure is not None and found.failure.startswith(why)
    assert count == 1


def test_no_more_requests_than_allowed_are_asked_at_once() -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> tuple[int, int]:
        server.gate.clear()
        scoring = asyncio.create_task(asking.score(ROW, [Answer(str(n)) for n in range(9)]))
        for _ in range(3):
            await server.arrived.get()
        server.gate.set()
        await scoring
        return server.most_at_once, len(server.asked)

    assert asked(lambda _: "score 1", act, max_concurrent=3) == (3, 9)


def test_the_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(server: JudgeServer, asking: JudgeScorer) -> str | None:
        await asking.score(ROW, [Answer("a")])
        return server.headers.get("authorization")

    monkeypatch.setenv("JUDGE_KEY", "abc")
    assert asked(lambda _: "score 1", act, api_key="env:JUDGE_KEY") == "Bearer abc"
    assert asked(lambda _: "score 1", act) is None
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(InvalidJob, match=r"judge\.api_key: .*env:JUDGE_KEY.*: there is no such"):
        asked(lambda _: "score 1", act, api_key="env:JUDGE_KEY")


def test_the_template_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("Rate: {{answer}}")
    (found,) = scored(
        lambda body: "score 1" if said(body) == "Rate: a" else "?",
        "a",
        prompt=None,
        prompt_file=f"{tmp_path}/judge.txt",
    )
    assert found.score == 1.0
    with pytest.raises(InvalidJob, match=r"prompt_file: .*: cannot be read: No such file"):
        scored(lambda _: "score 1", "a", prompt=None, prompt_file=f"{tmp_path}/none.txt")
