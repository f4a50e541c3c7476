"""verl's tools and interactions in the sandboxed processes of a replica."""

import asyncio
from pathlib import Path

from millrace.contracts.v1 import common_pb2
from services.rollout.episode.episode import Episode
from tests.services.rollout.environments.playing import account_of, call, environments, play

EXAMPLE = Path(__file__).parents[4] / "examples/environments/verl_tools"


def adding(text: str) -> str:
    """Adds two numbers with the tool, then says their sum."""
    sums = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
    return call("add", number=[2, 3][len(sums)]) if len(sums) < 2 else sums[-1].removeprefix("The sum is ")[:-1]


def test_the_example_is_played_in_its_process() -> None:
    options = {"tools": str(EXAMPLE / "tools.yaml"), "rewards": "tools"}

    async def scenario() -> Episode:
        async with environments("verl", options=options) as episodes:
            assert [each["function"]["name"] for each in episodes.environments.tools] == ["add"]
            return await play(episodes, adding, "5")

    episode = asyncio.run(scenario())
    (trajectory,) = episode.trajectories
    assert "The sum is 5." in trajectory.turns[2].given_text
    assert [turn.reward for turn in trajectory.turns] == [-0.05, -0.05, 0.0]
    assert episode.scored is not None and episode.scored.details == {"add_reward": 0.0}
    account = account_of(episode)
    assert (account.end, account.tool_calls) == (common_pb2.EPISODE_END_DONE, 2)
