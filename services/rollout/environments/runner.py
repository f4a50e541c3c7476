"""Runs the episodes of a job with an environment: turn by turn, within the job's limits."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.contracts.v1 import common_pb2
from millrace.contracts.v1.common_pb2 import EpisodeAccount
from millrace.drops import Drop, DropReason
from millrace.errors import BadRow
from millrace.spec import JobSpec
from millrace.spec.environment import Environment
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from millrace.validation import limits
from services.rollout.engine import Engine, Sampling
from services.rollout.environments.environment import Called, EnvironmentFailed, Environments, ProcessLost, Session
from services.rollout.episode.chat import Chat, Message
from services.rollout.episode.conversation import Conversation
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt
from services.rollout.episode.slots import EpisodeSlot
from services.rollout.scoring.scored import Scored

ATTEMPTS = 2
"""Runs of an episode whose environment fails, before its group is dropped."""
MOST_RUNS = 8
"""Runs of an episode, those included that ended because another one hung or crashed in the same process."""


@dataclass(frozen=True)
class EnvironmentEpisodes:
    """Runs episodes; a `RunEpisode`."""

    environments: Environments
    chat: Chat
    spec: JobSpec

    @property
    def environment(self) -> Environment:
        """What the job says of its environment."""
        assert self.spec.rollout.environment is not None
        return self.spec.rollout.environment

    @property
    def most_episodes(self) -> int:
        """Episodes that can be open at the same time."""
        return self.environments.most_episodes

    async def __call__(self, engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot) -> Episode:
        """One episode, which has its slot only while it generates. One whose environment fails is run again once.
        Raises EpisodeFailed, Unavailable if the environment cannot run any episode any more."""
        with slot.free():
            await slot.wait()
            return await self._run(engine, prompt, sampling, slot)

    async def _run(self, engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot) -> Episode:
        failures: list[str] = []
        for run in range(MOST_RUNS):
            account = EpisodeAccount(end=common_pb2.EPISODE_END_DONE, reruns=run)
            try:
                return await self._attempt(engine, prompt, sampling, slot, account)
            except ProcessLost as error:
                if run + 1 == MOST_RUNS:
                    failures.append(str(error))
            except EnvironmentFailed as error:
                failures.append(str(error))
            except TimeoutError:
                failures.append(f"the episode took longer than {self.environment.episode_s:g} s")
            except BadRow as error:
                raise EpisodeFailed(Drop(DropReason.BAD_PROMPT, str(error))) from error
            if len(failures) == ATTEMPTS:
                break
        raise EpisodeFailed(Drop(DropReason.ENVIRONMENT_FAILED, "; then ".join(failures)))

    async def _attempt(
        self, engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot, account: EpisodeAccount
    ) -> Episode:
        """The time limit begins when the environment has room for the episode."""
        async with self.environments.session() as session, asyncio.timeout(self.environment.episode_s) as limit:
            return await _Run(self, engine, session, sampling, slot, account, limit).run(prompt)


@dataclass
class _Run:
    """One run of one episode."""

    episodes: EnvironmentEpisodes
    engine: Engine
    session: Session
    sampling: Sampling
    slot: EpisodeSlot
    account: EpisodeAccount
    limit: asyncio.Timeout
    """The time of the episode."""
    turns: int = 0
    rewarded: bool = False

    async def run(self, prompt: Prompt) -> Episode:
        with span(SpanKind.ENVIRONMENT, detail="reset"):
            messages = await self.session.reset(prompt.row_fields())
        conversation = await asyncio.to_thread(Conversation, self.episodes.chat, messages)
        data = self.episodes.spec.data
        if (length := len(conversation.prompt)) > data.max_prompt_tokens:
            detail = f"{length} > {data.max_prompt_tokens} tokens"
            raise EpisodeFailed(Drop(DropReason.PROMPT_TOO_LONG, detail))
        while await self._turn(conversation):
            pass
        with span(SpanKind.ENVIRONMENT, detail="score"):
            score, details = await self.session.score()
        return self._episode(conversation, prompt, score, details)

    async def _turn(self, conversation: Conversation) -> bool:
        """Has the policy sample one turn, and adds what follows. Returns whether there is room for another."""
        room = min(self._room(conversation), self.episodes.environment.max_turn_tokens or limits.MOST_TOKENS)
        asked = replace(self.sampling, max_response_tokens=room)
        if not self.slot.goes_on:
            await self._held_back()
        with self.slot.taken():
            completion = await self.slot.generate(self.engine, conversation.prompt, asked, seen=conversation.seen)
        self.turns += 1
        message = await asyncio.to_thread(conversation.add, completion)
        if calls := message.get("tool_calls"):
            new, reward, done = await self._results(calls)
        else:
            with span(SpanKind.ENVIRONMENT, detail="step"):
                new, reward, done = await self.session.step(message)
        if reward is not None:
            self.rewarded = True
            conversation.reward(reward)
        if done:
            return False
        if self.turns >= self.episodes.environment.max_turns:
            self.account.end = common_pb2.EPISODE_END_TURNS
            return False
        if self._room(conversation) > 0:
            await asyncio.to_thread(conversation.tell, new)
        if self._room(conversation) <= 0:
            self.account.end = common_pb2.EPISODE_END_TOKENS
            return False
        return True

    async def _held_back(self) -> None:
        """Waits until the episode may go on. The time does not count for its limit."""
        clock, end = asyncio.get_running_loop().time, self.limit.when()
        assert end is not None
        began = clock()
        self.limit.reschedule(None)
        await self.slot.wait()
        self.limit.reschedule(end + clock() - began)

    def _room(self, conversation: Conversation) -> int:
        """Tokens that the next turn may have."""
        spec, response = self.episodes.spec, self.sampling.max_response_tokens
        whole = spec.data.max_prompt_tokens + response
        return min(response - conversation.response_tokens, whole - len(conversation.prompt))

    async def _results(self, calls: Sequence[Mapping[str, Any]]) -> tuple[list[Message], float | None, bool]:
        """Calls the tools of a turn, one after the other until one ends the episode: their results as messages to the
        policy, what the turn has earned with them, and whether the episode is over."""
        messages: list[Message] = []
        rewards: list[float] = []
        for call in calls:
            called = await self._call(call)
            name = {"name": call["function"]["name"]} if "function" in call else {}
            messages.append({"role": "tool", "content": called.content, "tool_call_id": call["id"], **name})
            rewards += [] if called.reward is None else [called.reward]
            if called.done:
                break
        return messages, sum(rewards) if rewards else None, called.done

    async def _call(self, call: Mapping[str, Any]) -> Called:
        """What a tool answers, entered into the account."""
        started = asyncio.get_running_loop().time()
        function = call.get("function")
        if function is None:
            called = Called(f"Error: the call cannot be read ({call['status']}).", failed=True)
        else:
            with span(SpanKind.TOOL, detail=function["name"][:100]) as calling:
                called = await self.session.call(function["name"], _decoded(function["arguments"]))
                calling.figures["failed"] = float(called.failed)
        self.account.tool_calls += 1
        self.account.tool_failures += called.failed
        self.account.tool_s += asyncio.get_running_loop().time() - started
        return called

    def _episode(
        self, conversation: Conversation, prompt: Prompt, score: float | None, details: dict[str, Any]
    ) -> Episode:
        trajectories = list(conversation.trajectories())
        first = trajectories[0]
        if first.prompt is not None and first.prompt.tolist() == prompt.rendered.token_ids:
            trajectories[0] = replace(first, prompt=None, prompt_text="")
        if score is None and self.rewarded:
            score = 0.0
        return Episode(tuple(trajectories), None if score is None else Scored(score, details), self.account)


def _decoded(arguments: str) -> Any:
    """The arguments of a call; the text itself if it is not JSON, which no tool accepts."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
