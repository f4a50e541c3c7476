"""Episodes that share a process and an engine: they wait side by side, and one that hangs costs the others a run."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.contracts.v1 import common_pb2
from millrace.drops import DropReason
from services.coordinator.state.group import Wanted, fault
from services.rollout.environments.processes import EnvironmentPool
from services.rollout.episode.episode import Episode, EpisodeFailed
from tests.models import CALL, CHATML, save_tiny_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.environments.playing import account_of, call, environments, play
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.stack import replica_stack

MEETING = '''
import asyncio, time
from millrace.environments import Environment, tool

HERE, ALL_HERE = [], asyncio.Event()

class Meeting(Environment):
    def __init__(self, wanted):
        self.wanted = wanted

    async def reset(self, row):
        self.kind = row["ground_truth"]
        return await super().reset(row)

    async def meet(self):
        HERE.append(self)
        if len(HERE) >= self.wanted:
            ALL_HERE.set()
        await ALL_HERE.wait()

    async def step(self, message):
        await self.meet()
        return "", 1.0, True

    @tool
    async def wait(self) -> str:
        """Waits until all have come."""
        await self.meet()
        return "all are here"

    @tool
    async def forever(self) -> str:
        """Waits without end."""
        HERE.append(self)
        await asyncio.Event().wait()
        return ""

    @tool
    def hang(self) -> str:
        """Blocks the process."""
        time.sleep(3600)
        return ""

    @tool
    def take_long(self) -> str:
        """Takes a while, and nobody else goes on meanwhile."""
        time.sleep(0.8)
        return "done"

    @tool
    def closed(self) -> str:
        """Says how many environments were closed."""
        return f"{CLOSED} closed"

    async def close(self):
        global CLOSED
        CLOSED += 1

CLOSED = 0

class FirstTwo(Environment):
    started = {}

    async def reset(self, row):
        self.number = FirstTwo.started[row["index"]] = FirstTwo.started.get(row["index"], 0) + 1
        return await super().reset(row)

    async def step(self, message):
        if self.number > 2:
            await asyncio.Event().wait()
        return "", 1.0, True
'''


@pytest.fixture(scope="session")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("meeting") / "meeting.py"
    path.write_text(MEETING)
    return f"{path}:Meeting"


def once(name: str) -> Callable[[str], str]:
    """A policy that calls a tool and then ends the episode."""
    return lambda text: "good" if "<|im_start|>tool" in text else call(name)


def told(episode: Episode) -> str:
    """What the tool said."""
    text = episode.trajectories[0].turns[1].given_text
    return text.split("<|im_start|>tool\n")[1].split("<|im_end|>")[0]


def test_episodes_of_one_process_wait_side_by_side(meeting: str) -> None:
    async def scenario() -> None:
        async with environments(meeting, options={"wanted": 4}, episodes_per_process=4) as episodes:
            played = await asyncio.gather(*(play(episodes, once("wait"), "") for _ in range(4)))
            assert [told(one) for one in played] == ["all are here"] * 4
            assert [account_of(one).reruns for one in played] == [0] * 4

    asyncio.run(scenario())


def test_an_episode_that_hangs_is_dropped_and_those_beside_it_are_run_again(meeting: str) -> None:
    async def scenario() -> None:
        async with environments(meeting, options={"wanted": 3}, episodes_per_process=4, call_s=2.0) as episodes:
            waiting = [asyncio.create_task(play(episodes, once("wait"), "")) for _ in range(2)]
            with pytest.raises(EpisodeFailed) as failed:
                await play(episodes, once("hang"), "")
            assert failed.value.drop.reason is DropReason.ENVIRONMENT_FAILED
            assert failed.value.drop.detail.count("call: timeout after 2 s") == 2
            third = await play(episodes, once("wait"), "")
            played = [third, *await asyncio.gather(*waiting)]
            assert [told(one) for one in played] == ["all are here"] * 3

    asyncio.run(scenario())


@pytest.mark.matrix  # it takes 6 s
def test_plain_calls_that_wait_for_each_other_are_not_taken_for_a_process_that_hangs(meeting: str) -> None:
    """The last one is answered after 6.4 s; a process that says nothing is killed after 5."""

    async def scenario() -> None:
        async with environments(meeting, options={"wanted": 1}, call_s=2.0) as episodes:
            played = await asyncio.gather(*(play(episodes, once("take_long"), "") for _ in range(8)))
            assert [(told(one), account_of(one).reruns) for one in played] == [("done", 0)] * 8

    asyncio.run(scenario())


def test_a_cancelled_episode_is_closed_and_its_process_stays(meeting: str) -> None:
    async def scenario() -> None:
        async with environments(meeting, options={"wanted": 1}, episodes_per_process=2) as episodes:
            given_up = asyncio.create_task(play(episodes, once("forever"), ""))
            beside = await play(episodes, once("wait"), "")
            given_up.cancel()
            await asyncio.wait({given_up})
            assert given_up.cancelled() and told(beside) == "all are here"
            async with asyncio.timeout(60.0):
                while told(await play(episodes, once("closed"), "")) == "1 closed":
                    pass
            assert isinstance(episodes.environments, EnvironmentPool) and episodes.environments.restarts == 0

    asyncio.run(scenario())


def test_episodes_that_wait_for_their_environment_take_no_slot_of_the_engine(meeting: str, tmp_path: Path) -> None:
    """The engine has 2 slots. Nobody goes on before 12 episodes have said something, which takes 6 leases at once: more
    than the groups that may wait for their scores."""
    model = save_tiny_model(tmp_path, tied=True, chat_template=CHATML, never_sampled=CALL)
    environment = {"name": meeting, "options": {"wanted": 12}, "max_turn_tokens": 6, "processes": 1}
    environment |= {"episodes_per_process": 12, "renderer_options": {"tool_parser": "qwen3"}}
    rollout = {"environment": environment, "samples_per_prompt": 2, "engine_options": {"max_num_seqs": 2}}

    async def scenario() -> list[common_pb2.Group]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(model, rollout=rollout))
            for row in range(6):
                stack.coordinator.issue(row, samples=2, max_response_tokens=150)
            await until(lambda: stack.coordinator.answered == 6, 90.0)
            assert not stack.coordinator.dropped
            return list(stack.coordinator.groups.values())

    groups = asyncio.run(scenario())
    assert {one.account.reruns for group in groups for one in group.trajectories} == {0}


def test_a_group_is_complete_when_enough_episodes_are_and_the_others_leave_their_places(
    meeting: str, tmp_path: Path
) -> None:
    """Of 4 episodes 2 end and 2 would wait without end. All places are there for the next group."""
    model = save_tiny_model(tmp_path, tied=True, chat_template=CHATML, never_sampled=CALL)
    environment = {"name": meeting.replace(":Meeting", ":FirstTwo"), "max_turn_tokens": 6, "processes": 1}
    environment |= {"episodes_per_process": 4, "renderer_options": {"tool_parser": "qwen3"}}
    rollout = {"environment": environment, "samples_per_prompt": 4, "min_samples": 2}

    async def scenario() -> list[common_pb2.Group]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(model, rollout=rollout))
            for row in range(3):
                stack.coordinator.issue(row, samples=4, min_samples=2, max_response_tokens=150)
            await until(lambda: stack.coordinator.answered == 3, 90.0)
            assert not stack.coordinator.dropped
            return list(stack.coordinator.groups.values())

    for group in asyncio.run(scenario()):
        assert (len(group.trajectories), group.cancelled_episodes, group.failed_episodes) == (2, 2, 0)
        assert fault(group, Wanted(4, least=2, temperature=1.0, most_tokens=350)) is None


def test_no_more_episodes_are_leased_than_the_environment_can_run(meeting: str, tmp_path: Path) -> None:
    """It runs 4 at once, and the fifth lets them go on: the engine's 16 slots would take all groups."""
    model = save_tiny_model(tmp_path, tied=True, chat_template=CHATML, never_sampled=CALL)
    environment = {"name": meeting, "options": {"wanted": 5}, "max_turn_tokens": 6, "processes": 1}
    environment |= {"episodes_per_process": 4, "renderer_options": {"tool_parser": "qwen3"}}
    rollout = {"environment": environment, "samples_per_prompt": 2}

    async def scenario() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(model, rollout=rollout))
            for row in range(8):
                stack.coordinator.issue(row, samples=2, max_response_tokens=150)
            await until(lambda: len(stack.coordinator.leased) >= 2, 90.0)
            pool = stack.replica.job.environments if stack.replica.job else None
            assert isinstance(pool, EnvironmentPool)
            await until(lambda: pool.free == 0, 90.0)
            assert len(stack.coordinator.leased) <= 3, "one group may wait for a place"

    asyncio.run(scenario())
