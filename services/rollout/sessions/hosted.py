"""Episodes that a host of environments plays: a process of its own (`services/environments`), which samples every turn
at the replica's token endpoint and reports which of them make up the episode.

The session records what the engine sampled, with log-probabilities and versions. The host's traces say which of these
sequences are trained: a request that was made and then given up is in none.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from millrace.contracts.v1 import common_pb2
from millrace.drops import Drop, DropReason
from millrace.environments.built_in import Verifiers, options_of
from millrace.rewards.outcome import fits
from millrace.spec import JobSpec
from millrace.spec.environment import Environment
from millrace.wire.tls import trusted_by_host
from services.rollout.engine import Engine, Sampling
from services.rollout.environments.environment import EnvironmentFailed
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt, Trajectory
from services.rollout.episode.slots import EpisodeSlot
from services.rollout.scoring.scored import Scored
from services.rollout.sessions.open_sessions import OpenSessions
from services.rollout.sessions.policy import Chats, Policy
from services.rollout.sessions.session import AgentFailed, Session

ATTEMPTS = 2
"""Runs of an episode that fails, before its group is dropped."""
CONNECT_S = 10.0
LARGEST_ANSWER = 256 << 20
"""Bytes of an answer of the host."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Between two attempts to reach a host that is away."""
AT_A_LIMIT = (common_pb2.EPISODE_END_TURNS, common_pb2.EPISODE_END_TOKENS)
Span = tuple[int, bytes]
"""A turn: where it begins, and all tokens up to its end."""


class Branch(BaseModel):
    """A sequence of tokens of the episode, and the spans [start, end) of it that were sampled."""

    tokens: list[int]
    sampled: list[tuple[int, int]]

    def spans(self) -> Iterator[Span]:
        """The turns."""
        tokens = np.array(self.tokens, np.int32)
        return ((start, tokens[:end].tobytes()) for start, end in self.sampled)


class PlayedEpisode(BaseModel):
    """What the host answers."""

    reward: float | None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str
    branches: list[Branch]


@dataclass(frozen=True)
class HostedEpisodes:
    """Runs episodes; a `RunEpisode`."""

    sessions: OpenSessions
    chats: Chats
    spec: JobSpec
    options: Verifiers
    room: asyncio.Semaphore
    """A place for each episode that may run at once."""

    @classmethod
    def of_job(cls, spec: JobSpec, chat: Chat, sessions: OpenSessions) -> Self:
        """The episodes of a job whose environment is a host's."""
        environment = spec.rollout.environment
        assert environment is not None
        options = options_of(environment.name, environment.options)
        assert isinstance(options, Verifiers)
        return cls(sessions, Chats(chat), spec, options, asyncio.Semaphore(environment.episodes_at_once))

    @property
    def environment(self) -> Environment:
        """What the job says of its environment."""
        assert self.spec.rollout.environment is not None
        return self.spec.rollout.environment

    async def __call__(self, engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot) -> Episode:
        """One episode, which has its slot only while it generates. One that fails is run again once, as soon as the
        host answers. Raises EpisodeFailed, and what the engine raises."""
        policy = Policy.of_job(self.spec, self.environment, self.chats, engine, sampling, slot)
        with slot.free():
            await slot.wait()
            return await self._episode(policy, prompt)

    @property
    def most_episodes(self) -> int:
        """Episodes that can be open at the same time."""
        return self.environment.episodes_at_once

    async def _episode(self, policy: Policy, prompt: Prompt) -> Episode:
        failures: list[str] = []
        async with self.room:
            while len(failures) < ATTEMPTS:
                session = Session(policy, prompt, reruns=len(failures))
                try:
                    await self._reached()
                    with self.sessions.hold(session):
                        played = await self._played(session)
                    if session.failure is not None:
                        raise session.failure
                    return episode_of(session, played)
                except (AgentFailed, EnvironmentFailed) as error:
                    failures.append(str(error))
        raise EpisodeFailed(Drop(DropReason.ENVIRONMENT_FAILED, "; then ".join(failures)))

    async def _reached(self) -> None:
        """Waits until the host answers, as long as an episode may take. Raises EnvironmentFailed."""
        wait_s, limit_s, url = FIRST_WAIT_S, self.environment.episode_s, f"{self.options.url.rstrip('/')}/health"
        try:
            async with asyncio.timeout(limit_s), self._client(httpx.Timeout(CONNECT_S)) as client:
                while True:
                    try:
                        (await client.get(url)).raise_for_status()
                        return
                    except httpx.HTTPError:
                        await asyncio.sleep(wait_s)
                        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        except TimeoutError as error:
            raise EnvironmentFailed(f"the host {self.options.url} did not answer for {limit_s:g} s") from error

    async def _played(self, session: Session) -> PlayedEpisode:
        """What the host reports when the episode is over. Raises EnvironmentFailed."""
        limit_s = self.environment.episode_s
        session.deadline = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._answer(self._asked(session))
                played = PlayedEpisode.model_validate_json(answer)
        except TimeoutError as error:
            self.sessions.metrics.abandoned()
            raise EnvironmentFailed(f"the episode took longer than {limit_s:g} s") from error
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise EnvironmentFailed(f"the host {self.options.url} answered with status {status}") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise EnvironmentFailed(f"the host {self.options.url} ended during the episode: {why}") from error
        except ValidationError as error:
            raise EnvironmentFailed(f"the answer of the host {self.options.url} cannot be read") from error
        return played

    async def _answer(self, asked: dict[str, Any]) -> bytes:
        headers = {"content-type": "application/json"}
        if (variable := self.options.token_env) is not None:
            if not (secret := os.environ.get(variable)):
                raise EnvironmentFailed(f"the replica has no environment variable {variable}, the host's token")
            headers["authorization"] = f"Bearer {secret}"
        url, limits = f"{self.options.url.rstrip('/')}/episodes", httpx.Timeout(None, connect=CONNECT_S)
        parts, size = [], 0
        async with (
            self._client(limits) as client,
            client.stream("POST", url, content=json.dumps(asked), headers=headers) as answer,
        ):
            answer.raise_for_status()
            async for part in answer.aiter_bytes():
                parts.append(part)
                if (size := size + len(part)) > LARGEST_ANSWER:
                    raise EnvironmentFailed(f"the host answered with more than {LARGEST_ANSWER >> 20} MiB")
        return b"".join(parts)

    def _client(self, limits: httpx.Timeout) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=limits, trust_env=False, verify=trusted_by_host(self.options.url))

    def _asked(self, session: Session) -> dict[str, Any]:
        """The request for an episode, `EpisodeRequest` of `services/environments/messages.py`."""
        extra_info = session.prompt.row.extra_info
        if not isinstance(task := extra_info.get("task"), dict):
            raise EnvironmentFailed("the row has no extra_info.task, which names the host's task")
        if (endpoint := self.sessions.endpoint) is None:
            raise EnvironmentFailed("the replica serves no sessions")
        return {
            "task": task,
            "url": f"{endpoint.url}/sessions/{session.id}",
            "key": session.key,
            "model": self.options.tokenizer or self.spec.model.path,
            "renderer": {"name": self.environment.renderer, **self.environment.renderer_options},
            "seconds": self.environment.episode_s,
            "temperature": session.policy.sampling.temperature,
        }


def episode_of(session: Session, played: PlayedEpisode) -> Episode:
    """What the session recorded, as far as it is in the host's traces. An episode that failed because it had reached a
    limit of turns or tokens counts, without a reward. Raises EnvironmentFailed, AgentFailed."""
    recorded = session.episode() if session.turns else None
    ended_by_limit = recorded is not None and recorded.account is not None and recorded.account.end in AT_A_LIMIT
    if played.error and not ended_by_limit:
        raise EnvironmentFailed(played.error)
    if recorded is None:
        raise AgentFailed("the environment asked for no turn")
    reward = played.reward if played.reward is not None else 0.0
    if not fits(reward) or not all(map(fits, played.metrics.values())):
        raise EnvironmentFailed("a reward or a metric of the host is not a number to compute with")
    kept = trained(recorded.trajectories, session.prompt.rendered.token_ids, played.branches)
    return replace(recorded, trajectories=kept, scored=Scored(reward, played.metrics))


def trained(
    recorded: Sequence[Trajectory], prompt: Sequence[int], branches: Sequence[Branch]
) -> tuple[Trajectory, ...]:
    """The recorded trajectories, each up to its first turn that is in no branch. Raises EnvironmentFailed if a
    branch has a turn that was not recorded, or if nothing is left."""
    wanted = {span for branch in branches for span in branch.spans()}
    kept, found = list[Trajectory](), set[Span]()
    for each in recorded:
        spans = list(itertools.takewhile(wanted.__contains__, _spans(each, prompt)))
        found.update(spans)
        if spans:
            kept.append(replace(each, turns=each.turns[: len(spans)]))
    if missing := len(wanted - found):
        raise EnvironmentFailed(f"{missing} turns of the host's trace are not those that the engine sampled")
    if not kept:
        raise EnvironmentFailed("the host's trace has no turn that the engine sampled")
    return tuple(kept)


def _spans(trajectory: Trajectory, prompt: Sequence[int]) -> Iterator[Span]:
    begun: NDArray[np.int32] = np.array(prompt, np.int32) if trajectory.prompt is None else trajectory.prompt
    tokens = begun.astype(np.int32)
    for turn in trajectory.turns:
        start = len(tokens) + len(turn.given)
        tokens = np.concatenate([tokens, turn.given, turn.completion.tokens]).astype(np.int32)
        yield start, tokens.tobytes()
