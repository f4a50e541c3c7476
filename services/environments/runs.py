"""Runs episodes of an environment of verifiers against the token endpoint of a replica."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from millrace.wire.reach import past_proxies
from services.environments.messages import Branch, EpisodeRequest, PlayedEpisode

LONGEST_ERROR = 500


class Environment:
    """An environment of verifiers, loaded from its configuration."""

    def __init__(self, path: Path) -> None:
        """`path` names a JSON file with verifiers' `env` block: {taskset: {id, ...}, agent: {...}}."""
        self._config = resolve_env_config(json.loads(path.read_text(encoding="utf-8")))
        self._env = load_environment(self._config)
        self._tasks = type(self._env.taskset).task_type()

    @property
    def name(self) -> str:
        """The environment's name, which is the `data_source` of its rows."""
        return str(self._config.env_id)

    def rows(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        """Rows of data for a job, one a task."""
        for task in itertools.islice(iter(self._env.taskset), first, first + count):
            data = task.data.model_dump(mode="json")
            prompt = [{"role": "user", "content": task.data.prompt_text or task.data.name or self.name}]
            yield {
                "data_source": self.name,
                "prompt": prompt,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": task.data.idx, "task": data},
            }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds what its episodes share."""
        async with self._env.serving():
            yield

    async def run(self, asked: EpisodeRequest) -> PlayedEpisode:
        """One episode. An error in it is part of the result, not raised."""
        try:
            data = self._tasks.data_type().model_validate(dict(asked.task))
            (slot,) = self._env.slots(self._tasks(data, self._config.taskset.task))
            async with asyncio.timeout(asked.seconds):
                episode = await self._env.run_slot(slot, _context(asked))
        except TimeoutError:
            return PlayedEpisode(error=f"the episode took longer than {asked.seconds:g} s")
        except Exception as error:
            # The environment's code runs here, and may raise anything.
            return PlayedEpisode(error=f"{type(error).__name__}: {error}"[:LONGEST_ERROR])
        return _played_episode(episode)


def _context(asked: EpisodeRequest) -> ModelContext:
    """The replica's endpoint, as verifiers takes it."""
    os.environ.update(past_proxies(asked.url, os.environ))
    client = TrainClientConfig(
        base_url=f"{asked.url}/v1",
        api_key_var="MILLRACE_SESSION_KEY",  # not set: the header has the key
        headers={"Authorization": f"Bearer {asked.key}"},
        renderer=dict(asked.renderer),
        renderer_model_name=asked.model,
    )
    return ModelContext(client=client, model=asked.model, sampling=SamplingConfig(temperature=asked.temperature))


def _played_episode(episode: Any) -> PlayedEpisode:
    traces = episode.traces
    errors = [*episode.errors, *(each for trace in traces for each in trace.errors)]
    failed = not episode.ok or any(not trace.ok for trace in traces)
    error = f"{errors[-1].type}: {errors[-1].message}"[:LONGEST_ERROR] if errors else "it was not completed"
    scored = [trace for trace in traces if any(reward is not None for reward in trace.rewards.values())]
    metrics = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
    metrics |= {name: each.score for trace in traces for name, each in trace.rewards.items() if each is not None}
    branches = [_branch(each) for trace in traces for each in trace.branches if each.trainable]
    return PlayedEpisode(
        reward=sum(trace.reward for trace in scored) / len(scored) if scored else None,
        metrics=metrics,
        error=error if failed else "",
        branches=[each for each in branches if each.sampled],
    )


def _branch(branch: Any) -> Branch:
    tokens, mask = list(branch.token_ids), list(branch.sampled_mask)
    spans: list[tuple[int, int]] = []
    for place, sampled in enumerate(mask):
        if sampled and spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        elif sampled:
            spans.append((place, place + 1))
    return Branch(tokens, spans)
