"""Episodes with an environment in processes: what is trained, what fails, and what ends an episode."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.contracts.v1 import common_pb2
from millrace.data.chat import Rendered
from millrace.data.row import PromptRow
from millrace.drops import DropReason
from services.coordinator.state.group import Account, GroupSummary, Wanted, fault
from services.rollout.engine import CachedPrefix, Completion, Sampling
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.environments.runner import _Run
from services.rollout.episode.admission import Admission, EpisodeLimit
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt
from services.rollout.episode.slots import Slots
from tests.models import CALL, CHATML, save_tiny_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.engine_sequences import DTYPE, EngineSequences, skip_without
from tests.services.rollout.environments.playing import Scripted, account_of, call, environments, play
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.stack import replica_stack

DONE = common_pb2.EPISODE_END_DONE
GUESS = Path(__file__).parents[4] / "examples/environments/guess.py"
TALK = '''
import os, time
from millrace.environments import Environment, tool

FAILED = []

class Talk(Environment):
    async def reset(self, row):
        self.kind = row["ground_truth"]
        if self.kind == "fails once" and not FAILED:
            FAILED.append(True)
            raise RuntimeError("not yet")
        return await super().reset(row)

    async def step(self, message):
        if self.kind == "crash":
            os._exit(3)
        if self.kind == "raise":
            raise ValueError("no such move")
        if self.kind == "unrewarded":
            return "and then?", None, False
        return "and then?", 0.25, self.kind == "one turn"

    @tool
    def hang(self) -> str:
        """Hangs."""
        time.sleep(3600)
        return ""
'''


@pytest.fixture(scope="session")
def talk(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("talk") / "talk.py"
    path.write_text(TALK)
    return f"{path}:Talk"


FORGETFUL = CHATML.replace(
    "message.content", "(message.content[1:] if message.role == 'assistant' else message.content)"
)
"""It leaves out the first letter of what the policy said: no prompt extends what was sampled."""


VLLM = [pytest.mark.e2e, pytest.mark.matrix]  # the same with the Transformers engine, and vLLM's tokens in test_engines


@pytest.mark.parametrize(
    ("engine", "template", "trajectories"),
    [
        ("transformers", CHATML, 1),
        ("transformers", FORGETFUL, 3),
        pytest.param("vllm", CHATML, 1, marks=VLLM),
        pytest.param("vllm", FORGETFUL, 3, marks=VLLM),
        pytest.param("sglang", CHATML, 1, marks=pytest.mark.gpu),
        pytest.param("sglang", FORGETFUL, 3, marks=pytest.mark.gpu),
    ],
)
def test_what_is_trained_are_the_tokens_that_the_engine_saw(
    engine: str, template: str, trajectories: int, talk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(engine)
    model = save_tiny_model(tmp_path, tied=True, chat_template=template, never_sampled=CALL)
    seen = EngineSequences(monkeypatch)
    environment: dict[str, Any] = {"name": talk, "max_turns": 3, "max_turn_tokens": 6, "processes": 2}
    environment["renderer_options"] = {"tool_parser": "qwen3"}
    rollout = {"environment": environment, "max_response_tokens": 150, "dtype": DTYPE}
    spec = job_spec(model, engine, rollout=rollout)

    async def scenario() -> common_pb2.Group:
        async with replica_stack(engine) as stack:
            await stack.serve(spec, version=3)
            prompt_id = stack.coordinator.issue(7, samples=2, max_response_tokens=150)
            await until(lambda: stack.coordinator.answered == 1, 90.0)
            assert not stack.coordinator.dropped
            return stack.coordinator.groups[prompt_id]

    group = asyncio.run(scenario())
    assert list(group.episode_trajectories) == ([] if trajectories == 1 else [trajectories] * 2)
    assert fault(group, Wanted(2, temperature=1.0, most_tokens=350)) is None
    seen.check(group, version=3)
    assert len(seen.all) == 6
    rewards = [turn.reward for one in group.trajectories for turn in one.turns]
    assert rewards == [0.25] * 6 and [one.reward for one in group.trajectories if one.HasField("reward")] == [0.0] * 2
    accounts = [one.account for one in group.trajectories if one.HasField("account")]
    assert [account.end for account in accounts] == [common_pb2.EPISODE_END_TURNS] * 2
    assert all(account.episode_limit >= account.open_episodes > 0 == account.held_back_s for account in accounts)
    assert group.trajectories[-1].HasField("account")
    summary = GroupSummary.from_json(GroupSummary.of(group).to_json())
    assert summary.accounts == [Account.of(account) for account in accounts]
    assert not any(account.ended or account.tool_calls or account.reruns for account in summary.accounts)


@pytest.mark.parametrize("found", [0, 10**6], ids=["nothing is found", "all is found"])
def test_episodes_are_held_back_between_turns_where_the_cache_lost_their_turns(
    found: int, talk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica sees of a cache that is too small only what the engine tells, as here."""
    generate = TransformersEngine._generate

    async def told(self: Any, prompt_tokens: Any, sampling: Sampling, response: Any) -> Completion:
        completion = await generate(self, prompt_tokens, sampling, response)
        return replace(completion, cached=CachedPrefix(found, 1, self._cache_key, time.monotonic()))

    monkeypatch.setattr(TransformersEngine, "_generate", told)
    model = save_tiny_model(tmp_path, tied=True, chat_template=CHATML, never_sampled=CALL)
    environment = {"name": talk, "max_turns": 4, "max_turn_tokens": 3, "processes": 1}
    environment["renderer_options"] = {"tool_parser": "qwen3"}
    options = {"environment": environment, "max_response_tokens": 180, "engine_options": {"max_num_seqs": 4}}

    async def scenario() -> tuple[list[common_pb2.EpisodeAccount], int | None]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(model, rollout=options))
            for row in range(6):
                stack.coordinator.issue(row, samples=2, max_response_tokens=180)
            await until(lambda: stack.coordinator.answered == 6, 90.0)
            assert not stack.coordinator.dropped
            groups = stack.coordinator.groups.values()
            accounts = [one.account for group in groups for one in group.trajectories if one.HasField("account")]
            return accounts, stack.replica.leases.admission.limit

    accounts, limit = asyncio.run(scenario())
    assert len(accounts) == 12 and not any(account.reruns for account in accounts)
    assert all(account.prefix_tokens > account.cached_prefix_tokens == 0 for account in accounts) is (found == 0)
    assert any(account.held_back_s > 0 for account in accounts) is (found == 0)
    # By how much it falls depends on how many are open; half of the engine's four slots always fit.
    assert limit is not None and (2 <= limit < 32 if found == 0 else limit == 32)


def test_the_time_of_an_episode_stands_still_while_it_is_held_back() -> None:
    async def scenario() -> None:
        admission = Admission(EpisodeLimit(1))
        nothing: Any = None
        older = ExitStack()
        older.enter_context(admission.place())
        with Slots(1, admission=admission).episode() as slot:
            async with asyncio.timeout(60) as limit:
                end = limit.when() or 0.0
                run = _Run(nothing, nothing, nothing, Sampling(1), slot, common_pb2.EpisodeAccount(), limit)
                held = asyncio.create_task(run._held_back())
                await until(lambda: admission.waiting == 1)
                assert limit.when() is None
                older.close()
                await held
                assert (limit.when() or 0.0) > end

    asyncio.run(scenario())


def bisect(text: str) -> str:
    """Finds the number as one would, after a call that cannot be read and one that is refused."""
    answers = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
    if len(answers) < 2:
        return ["<tool_call>{oh</tool_call>", call("compare", guess=1000)][len(answers)]
    low, high, middle = 1, 100, 50
    for answer in answers[2:]:
        if answer == "equal":
            return str(middle)
        low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
        middle = (low + high) // 2
    return call("compare", guess=middle)


def test_the_example_is_played_with_its_tool() -> None:
    async def scenario() -> Episode:
        async with environments(f"{GUESS}:Guess") as episodes:
            return await play(episodes, bisect, "37")

    episode = asyncio.run(scenario())
    (trajectory,) = episode.trajectories
    assert "cannot be read (invalid_json)" in trajectory.turns[1].given_text
    assert "the number lies between 1 and 100" in trajectory.turns[2].given_text
    account = account_of(episode)
    asked = account.tool_calls - 2
    assert (account.end, account.tool_failures, asked) == (DONE, 2, len(trajectory.turns) - 3)
    assert account.tool_s > 0.0
    assert trajectory.turns[-1].reward == 1.0
    assert episode.scored is not None and episode.scored.score == pytest.approx(-0.05 * asked)


def test_a_failing_environment_costs_its_episode_and_no_other(talk: str) -> None:
    async def scenario() -> None:
        async with environments(talk, call_s=1.0, max_turns=2) as episodes:
            for kind, said, detail in (
                ("raise", "x", "step: raised ValueError: no such move (talk.py"),
                ("crash", "x", "step: exited with status 3"),
                ("", call("hang"), "call: timeout after 1 s"),
            ):
                with pytest.raises(EpisodeFailed) as failed:
                    await play(episodes, lambda _, said=said: said, kind)
                drop = failed.value.drop
                assert drop.reason is DropReason.ENVIRONMENT_FAILED and drop.detail.count(detail) == 2, drop
            assert account_of(await play(episodes, lambda _: "x", "one turn")).end == DONE

    asyncio.run(scenario())


def test_an_episode_that_fails_once_is_run_again_and_its_limits_end_it(talk: str) -> None:
    async def scenario() -> None:
        async with environments(talk, max_turns=2) as episodes:
            again = account_of(await play(episodes, lambda _: "x", "fails once"))
            assert (again.end, again.reruns) == (common_pb2.EPISODE_END_TURNS, 1)
            cut = await play(episodes, lambda _: "x" * 30, "", most_tokens=20)
            assert account_of(cut).end == common_pb2.EPISODE_END_TOKENS and len(cut.trajectories[0].turns) == 1
            assert cut.scored is not None and cut.scored.score == 0.0
            unrewarded = await play(episodes, lambda _: "x", "unrewarded")
            assert unrewarded.scored is None, "the reward function scores what the environment does not"

    asyncio.run(scenario())


def test_an_episode_has_a_deadline(talk: str) -> None:
    async def scenario() -> None:
        async with environments(talk, episode_s=0.2) as episodes:
            engine: Any = Scripted(None)
            engine.generate = lambda *_: asyncio.Event().wait()
            prompt = Prompt(PromptRow(0, "d", "hi", ""), Rendered([1]), "")
            too_long = r"took longer than 0.2 s; then the episode took longer"
            with Slots(1).episode() as slot, pytest.raises(EpisodeFailed, match=too_long):
                await episodes(engine, prompt, Sampling(9), slot)

    asyncio.run(scenario())
