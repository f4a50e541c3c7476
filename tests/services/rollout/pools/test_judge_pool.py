"""A judge in a pool: the endpoint of its replicas as OpenAI's clients see it, and groups that it scores."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.errors import InvalidJob
from millrace.spec import JobSpec
from services.rollout.engine import Completion, Load, Sampling, StopReason
from services.rollout.judges import client as judge_client
from services.rollout.pools.replica import WAITING
from tests.later import Later
from tests.models import byte_tokenizer, save_judge_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.pools.pool_stack import Scoring, pool_replica
from tests.services.rollout.stack import replica_stack

openai: Any = Later("openai")

pytestmark = pytest.mark.slow
ASKED: list[Any] = [{"role": "user", "content": "How good is this?"}]
JUDGE = {"pool": "judge", "prompt": "Rate {{answer}}", "scale": [0, 10], "options": {"temperature": 0.0}}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge_model(tmp_path_factory.mktemp("judge"))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "FIRST_PAUSE_S", 0.05)


def job(policy: Path, judge: Path, **pool: Any) -> JobSpec:
    declared = {"name": "judge", "path": str(judge), "dtype": "float32", "engine_options": {"device": "cpu"}, **pool}
    functions = [{"name": "right", "function": "exact"}, {"name": "quality", "judge": JUDGE, "weight": 0.5}]
    spec = job_spec(policy, rollout={"max_response_tokens": 8}).model_dump(mode="json")
    return JobSpec.model_validate(spec | {"pools": [declared], "reward": {"functions": functions, "workers": 1}})


@asynccontextmanager
async def judging(policy: Path, judge: Path, **pool: Any) -> AsyncIterator[Scoring]:
    """A replica that is ready to reply."""
    async with pool_replica("judge", "secret") as scoring:
        await scoring.configure(job(policy, judge, **pool))
        yield scoring


def openai_client(scoring: Scoring, key: str = "secret") -> Any:
    return openai.AsyncOpenAI(base_url=f"http://{scoring.endpoint}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


def test_a_judge_on_the_own_fleet_scores_beside_a_function(tied_model: Path, judge_model: Path) -> None:
    """The group waits until the pool has a replica. A replica that does not answer any more is passed over."""

    async def scenario() -> None:
        async with (
            replica_stack() as stack,
            pool_replica("judge") as dead,
            pool_replica("judge") as right,
        ):
            coordinator, spec = stack.coordinator, job(tied_model, judge_model)
            await stack.serve(spec)
            coordinator.issue(0, ground_truth="x")
            await until(lambda: coordinator.pools_asked)
            assert not coordinator.answered
            await right.configure(spec)
            await dead.die()
            coordinator.endpoints["judge"] = [dead.endpoint, right.endpoint]
            coordinator.pools["judge"] = [dead.address, right.address]
            for number in range(1, 4):
                coordinator.issue(number, ground_truth="x")
            await until(lambda: coordinator.answered == 4, WAIT_S)
            assert len(coordinator.groups) == 4 and not coordinator.dropped
            for group in coordinator.groups.values():
                for one in group.trajectories:
                    details = json.loads(one.reward_details)
                    assert (details["quality"], details["quality_reply"]) == (0.7, "Score: 7")
                    assert one.reward == pytest.approx(0.35)
            assert right.replica.tokens > 0

    asyncio.run(scenario())


def test_the_endpoint_is_one_of_openai(tied_model: Path, judge_model: Path) -> None:
    async def scenario() -> None:
        async with judging(tied_model, judge_model) as scoring, openai_client(scoring) as client:
            (model,) = (await client.models.list()).data
            assert (model.id, model.model_dump()["max_model_len"]) == ("judge", 512)
            asked: dict[str, Any] = {"model": "judge", "messages": ASKED, "temperature": 0.0}
            whole = await client.chat.completions.create(**asked, logprobs=True)
            choice, usage = whole.choices[0], whole.usage
            assert (choice.message.content, choice.finish_reason) == ("Score: 7", "stop")
            prompt = byte_tokenizer().apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
            assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 9)
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert "".join(each.token for each in choice.logprobs.content).startswith("Score: 7")
            cut = await client.chat.completions.create(**asked, max_tokens=3)
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Sco", "length")
            stopped = await client.chat.completions.create(**asked, stop=":")
            assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("Score", "stop")
            stream = await client.chat.completions.create(**asked, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in stream])
            assert text == "Score: 7"

    asyncio.run(scenario())


def test_what_the_endpoint_refuses(tied_model: Path, judge_model: Path) -> None:
    async def scenario() -> None:
        async with pool_replica("judge", "secret") as scoring, openai_client(scoring) as client:
            asked: dict[str, Any] = {"model": "judge", "messages": ASKED}
            with pytest.raises(openai.InternalServerError, match="is not ready") as early:
                await client.chat.completions.create(**asked)
            assert (early.value.response.status_code, early.value.response.headers["retry-after"]) == (503, "2")
            await scoring.configure(job(tied_model, judge_model))
            wrong = openai_client(scoring, "wrong")
            with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
                await wrong.chat.completions.create(**asked)
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
            refused: list[tuple[dict[str, Any], str]] = [
                ({"messages": [{"role": "user", "content": "long " * 200}]}, "the model takes 512 with its reply"),
                ({"temperature": 1000.0}, "temperature: 1000.0"),
                ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "replies call no tools"),
                ({"n": 2}, "one turn at a time"),
                ({"response_format": {"type": "json_object"}}, "response_format.type"),
                ({"extra_body": {"chat_template_kwargs": {"tokenize": 1}}}, "not an argument of a chat template"),
            ]
            for fields, reason in refused:
                with pytest.raises(openai.BadRequestError, match=reason):
                    await client.chat.completions.create(**{**asked, **fields})
            scoring.replica.drain()
            with pytest.raises(openai.InternalServerError, match="is not ready"):
                await client.chat.completions.create(**asked)

    asyncio.run(scenario())


class Stuck:
    """An engine that replies when it is told to."""

    at_once, context, vocabulary = 1, 512, 259

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.asked = 0
        self.cancelled = 0

    async def reply(self, prompt_tokens: list[int], sampling: Sampling) -> Completion:
        self.asked += 1
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), (), StopReason.LENGTH, "so")

    async def stop(self) -> None: ...


@asynccontextmanager
async def stuck(policy: Path, judge: Path, **pool: Any) -> AsyncIterator[tuple[Scoring, Stuck]]:
    async with judging(policy, judge, **pool) as scoring:
        engine: Any = Stuck()
        assert scoring.replica._engine is not None
        await scoring.replica._engine.stop()
        scoring.replica._engine = engine
        yield scoring, engine


def test_a_replica_that_is_full_says_when_to_ask_again(tied_model: Path, judge_model: Path) -> None:
    async def scenario() -> None:
        async with stuck(tied_model, judge_model) as (scoring, engine), openai_client(scoring) as client:
            asked: dict[str, Any] = {"model": "judge", "messages": ASKED}
            running = [asyncio.create_task(client.chat.completions.create(**asked)) for _ in range(WAITING)]
            await until(lambda: engine.asked == WAITING, WAIT_S)
            assert scoring.replica.load() == Load(1, WAITING - 1)
            with pytest.raises(openai.RateLimitError) as full:
                await client.chat.completions.create(**asked)
            assert full.value.response.headers["retry-after"] == "2"
            engine.goes_on.set()
            assert [(await each).choices[0].message.content for each in running] == ["so"] * len(running)
            assert (await client.chat.completions.create(**asked)).choices[0].message.content == "so"

    asyncio.run(scenario())


def test_a_reply_ends_with_its_deadline_and_with_its_caller(tied_model: Path, judge_model: Path) -> None:
    async def scenario() -> None:
        async with stuck(tied_model, judge_model, timeout_s=0.1) as (scoring, engine), openai_client(scoring) as client:
            with pytest.raises(openai.InternalServerError, match=r"longer than the 0\.1 s that the pool judge gives"):
                await client.chat.completions.create(model="judge", messages=ASKED)
            assert engine.cancelled == 1
        async with stuck(tied_model, judge_model) as (scoring, engine), openai_client(scoring) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="judge", messages=ASKED))
            await until(lambda: engine.asked, WAIT_S)
            asking.cancel()
            await until(lambda: engine.cancelled, WAIT_S)
            await until(lambda: scoring.replica.load() == Load(0, 0), WAIT_S)

    asyncio.run(scenario())


def test_other_pools_do_not_reply(tied_model: Path) -> None:
    """A teacher's replica serves the endpoint, and says what it is for."""
    teacher = {"name": "teacher", "path": str(tied_model), "dtype": "float32", "engine_options": {"device": "cpu"}}
    algorithm = {"distillation": {"pool": "teacher", "loss": "k1"}}
    spec = job_spec(tied_model).model_dump(mode="json") | {"pools": [teacher], "algorithm": algorithm}

    async def scenario() -> tuple[int, str]:
        async with pool_replica("teacher") as scoring, httpx.AsyncClient(timeout=WAIT_S) as client:
            await scoring.configure(JobSpec.model_validate(spec))
            url = f"http://{scoring.endpoint}/v1/chat/completions"
            answer = await client.post(url, json={"messages": ASKED})
            return answer.status_code, answer.json()["error"]["message"]

    status, message = asyncio.run(scenario())
    assert status == 404 and "gives log-probabilities, not replies" in message


def test_a_judge_without_a_chat_template_is_refused(tied_model: Path, tmp_path: Path) -> None:
    folder = save_judge_model(tmp_path)
    byte_tokenizer(None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)

    async def scenario() -> None:
        async with judging(tied_model, folder):
            pass

    with pytest.raises(InvalidJob, match=r"pools\.0\.path: .* has no chat template"):
        asyncio.run(scenario())
