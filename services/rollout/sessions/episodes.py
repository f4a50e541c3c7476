"""Runs the episodes of a job with an agent: each is a session that the agent plays."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from millrace.drops import Drop, DropReason
from millrace.errors import refused
from millrace.spec import JobSpec
from millrace.spec.environment import Agent
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.rollout.engine import Engine, Sampling
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt
from services.rollout.episode.slots import EpisodeSlot
from services.rollout.sessions.command import Ended, run
from services.rollout.sessions.open_sessions import OpenSessions
from services.rollout.sessions.policy import Chats, Policy
from services.rollout.sessions.session import AgentFailed, Session

UNSANDBOXED = "MILLRACE_UNSANDBOXED_AGENTS"
"""Environment variable by which the operator of a replica allows commands outside of a sandbox: 1."""
ATTEMPTS = 2
"""Runs of an episode whose agent fails, before its group is dropped."""
LONGEST_REASON = 300
"""Characters of a command's last line that a failure reports."""


def check_allowed(agent: Agent | None, environment: Mapping[str, str]) -> None:
    """Raises InvalidJob for a command without a sandbox, unless the replica's operator allows them."""
    if agent is not None and agent.command and not agent.sandbox and environment.get(UNSANDBOXED) != "1":
        reason = "the operator of the replicas does not allow commands outside of a sandbox"
        raise refused("rollout.agent.sandbox", False, reason, f"leave it out, or set {UNSANDBOXED}=1 on each replica.")


@dataclass(frozen=True)
class AgentEpisodes:
    """Runs episodes; a `RunEpisode`."""

    sessions: OpenSessions
    chats: Chats
    spec: JobSpec
    running: asyncio.Semaphore
    """Commands that may be started."""

    @classmethod
    def of_job(cls, spec: JobSpec, chat: Chat, sessions: OpenSessions) -> Self:
        """The episodes of a job that has an agent."""
        assert spec.rollout.agent is not None
        return cls(sessions, Chats(chat), spec, asyncio.Semaphore(spec.rollout.agent.commands))

    @property
    def agent(self) -> Agent:
        """What the job says of its agent."""
        assert self.spec.rollout.agent is not None
        return self.spec.rollout.agent

    async def __call__(self, engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot) -> Episode:
        """One episode, which has its slot while it waits to be claimed and while it generates. One whose agent fails or
        takes too long is run again once. Raises EpisodeFailed, and what the engine raises."""
        policy = Policy.of_job(self.spec, self.agent, self.chats, engine, sampling, slot)
        with slot.free():
            await slot.wait()
            return await self._episode(policy, prompt)

    @property
    def most_episodes(self) -> int:
        """Episodes that can be open at the same time."""
        return self.agent.commands if self.agent.command else self.agent.sessions

    async def _episode(self, policy: Policy, prompt: Prompt) -> Episode:
        failures: list[str] = []
        while len(failures) < ATTEMPTS:
            session = Session(policy, prompt, reruns=len(failures))
            try:
                with self.sessions.hold(session):
                    with span(SpanKind.ENVIRONMENT, detail="agent"):
                        ended = await self._played(session)
                    return _with(session.episode(), ended)
            except AgentFailed as error:
                failures.append(str(error))
        raise EpisodeFailed(Drop(DropReason.ENVIRONMENT_FAILED, "; then ".join(failures)))

    async def _played(self, session: Session) -> Ended | None:
        """Returns when the agent has ended the episode; how its command ended, if one did. Raises AgentFailed, and
        what the engine raised."""
        if self.agent.command:
            async with self.running:
                return await self._run(session)
        # What no agent has claimed keeps its slot: a replica offers no more episodes than it could generate at once.
        with session.policy.slot.taken():
            await self.sessions.offer(session, self.agent.episode_s)
        async with self._limit():
            await session.ended.wait()
        if session.failure is not None:
            raise session.failure
        return None

    async def _run(self, session: Session) -> Ended | None:
        """Runs the command until it has ended, or the session has."""
        assert self.sessions.endpoint is not None
        session.deadline = asyncio.get_running_loop().time() + self.agent.episode_s
        row, endpoint = session.prompt.row_fields(), self.sessions.endpoint
        command = asyncio.create_task(run(self.agent, self.spec.reward, session, endpoint, row))
        over = asyncio.create_task(session.ended.wait())
        try:
            async with self._limit():
                await asyncio.wait({command, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            command.cancel()
            await asyncio.wait({command})
        if session.failure is not None:
            raise session.failure
        if command.cancelled():
            return None
        ended = command.result()
        if ended.status != 0 and not session.ended.is_set() and not session.at_limit:
            last = ended.tail.strip().rpartition("\n")[2]
            raise AgentFailed(f"the command ended with status {ended.status}: {last[:LONGEST_REASON]}")
        return ended

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        """The time of an episode. Raises AgentFailed when it is over."""
        try:
            async with asyncio.timeout(self.agent.episode_s):
                yield
        except TimeoutError as error:
            self.sessions.metrics.abandoned()
            raise AgentFailed(f"the episode took longer than {self.agent.episode_s:g} s") from error


def _with(episode: Episode, ended: Ended | None) -> Episode:
    """The episode, with how its command ended in the metadata of the last trajectory."""
    if ended is None:
        return episode
    *before, last = episode.trajectories
    metadata = {**last.metadata, "agent": {"status": ended.status, "output": ended.tail}}
    return replace(episode, trajectories=(*before, replace(last, metadata=metadata)))
