"""Episodes played against a policy that a test writes, with environments in real processes."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from millrace.contracts.v1 import common_pb2
from millrace.data.chat import Rendered
from millrace.data.row import PromptRow
from services.rollout.engine import Completion, Sampling
from services.rollout.environments.runner import EnvironmentEpisodes
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Episode, Prompt
from services.rollout.episode.slots import Slots
from services.rollout.work.job import environments_of
from tests.services.rollout.episode.formats import CHATML as PLAIN_CHATML
from tests.services.rollout.episode.formats import merging_tokenizer, sampled
from tests.services.rollout.jobs import job_spec

TOKENIZER = merging_tokenizer(PLAIN_CHATML)


class Scripted:
    """An engine whose policy is a function of the text before."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.limits = policy, list[int]()

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        self.limits.append(sampling.max_response_tokens)
        text = self.policy(TOKENIZER.decode(prompt_tokens))
        return sampled(TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False)[: sampling.max_response_tokens])


@asynccontextmanager
async def environments(name: str, **fields: Any) -> AsyncIterator[EnvironmentEpisodes]:
    environment = {"name": name, "processes": 1, "renderer_options": {"tool_parser": "qwen3"}, **fields}
    spec = job_spec(Path("/nowhere"), rollout={"environment": environment, "max_response_tokens": 2000})
    assert spec.rollout.environment is not None
    opened = environments_of(spec.rollout.environment, spec.reward)
    assert opened is not None
    await opened.start()
    try:
        chat = Chat(TOKENIZER, "default", {"tool_parser": "qwen3"}, tools=opened.tools)
        yield EnvironmentEpisodes(opened, chat, spec)
    finally:
        await opened.close()


async def play(episodes: EnvironmentEpisodes, policy: Any, truth: str, most_tokens: int = 2000) -> Episode:
    row = PromptRow(0, "d", [{"role": "user", "content": "hi"}], truth)
    prompt = Prompt(row, Rendered([1, 2]), "")
    engine: Any = Scripted(policy)
    with Slots(1).episode() as slot:
        return await episodes(engine, prompt, Sampling(most_tokens), slot)


def account_of(episode: Episode) -> common_pb2.EpisodeAccount:
    """As it is told with the last trajectory."""
    return episode.messages()[-1].account


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
