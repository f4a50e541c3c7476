"""Runs the episodes of a job with an agent: each is a session that the agent plays."""

import asyncio
from dataclasses import dataclass
from typing import Any, Self

from millrace.drops import Drop, DropReason
from millrace.spec import JobSpec
from millrace.spec.episodes.agent import Agent
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.rollout.engine import Engine, Sampling
from services.rollout.sessions.open_sessions import OpenSessions
from services.rollout.sessions.policy import Chats, Policy
from services.rollout.sessions.session import AgentFailed, Session
from services.rollout.work.episode import Episode
from services.rollout.work.groups import EpisodeFailed
from services.rollout.work.job import Job, Prompt
from services.rollout.work.sampled import OnSample

ATTEMPTS = 2
"""Runs of an episode whose agent fails, before its group is dropped."""


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt, as agents get it."""
    row = prompt.row
    told = {"index": row.index, "data_source": row.data_source, "prompt": row.prompt}
    return {**told, "ground_truth": row.ground_truth, "extra_info": row.extra_info}


@dataclass(frozen=True)
class AgentEpisodes:
    """Runs episodes; a `RunEpisode`."""

    sessions: OpenSessions
    chats: Chats
    spec: JobSpec

    @classmethod
    def of_job(cls, job: Job, sessions: OpenSessions) -> Self:
        """The episodes of a job that has an agent."""
        assert job.chat is not None
        return cls(sessions, Chats(job.chat), job.spec)

    @property
    def agent(self) -> Agent:
        """What the job says of its agent."""
        assert self.spec.rollout.agent is not None
        return self.spec.rollout.agent

    async def __call__(self, engine: Engine, prompt: Prompt, sampling: Sampling, on_sample: OnSample) -> Episode:
        """One episode. One whose agent fails or takes too long is run again once. Raises EpisodeFailed, and what the
        engine raises."""
        failures: list[str] = []
        policy = self._policy(engine, sampling, on_sample)
        while len(failures) < ATTEMPTS:
            session = Session(policy, prompt, reruns=len(failures))
            try:
                with self.sessions.hold(session):
                    with span(SpanKind.ENVIRONMENT, detail="agent"):
                        await self._played(session)
                    return session.episode()
            except AgentFailed as error:
                failures.append(str(error))
        raise EpisodeFailed(Drop(DropReason.ENVIRONMENT_FAILED, "; then ".join(failures)))

    async def _played(self, session: Session) -> None:
        """Returns when the agent has ended the episode. Raises AgentFailed, and what the engine raised."""
        limit_s = self.agent.episode_s
        await self.sessions.offer(session, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                await session.ended.wait()
        except TimeoutError as error:
            raise AgentFailed(f"the episode took longer than {limit_s:g} s") from error
        if session.failure is not None:
            raise session.failure

    def _policy(self, engine: Engine, sampling: Sampling, on_sample: OnSample) -> Policy:
        return Policy(
            engine=engine,
            chats=self.chats,
            sampling=sampling,
            on_sample=on_sample,
            longest=self.spec.data.max_prompt_tokens + sampling.max_response_tokens,
            max_turns=self.agent.max_turns,
            max_turn_tokens=self.agent.max_turn_tokens,
            model=self.spec.model.path,
        )
