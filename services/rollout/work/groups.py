"""From a lease to its answer: the prompt's tokens, n episodes run concurrently, their scores, one group. And
the parts of its responses, which a replica reports with each extension and continues from."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.contracts.trajectories import assembled, tokens_of
from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import BadRow, InvalidRequest
from millrace.ids import MemberId, Version
from millrace.rewards.outcome import BadOutcome, separate_rewards
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.wire import arrays
from services.rollout.engine import Engine, Partial, Response, Sampling, ShownImages, VersionSpan
from services.rollout.episode.admission import EpisodeLimit
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt
from services.rollout.episode.slots import EpisodeSlot, Slots
from services.rollout.scoring.scored import Answer, Scored
from services.rollout.work.job import Job

RunEpisode = Callable[[Engine, Prompt, Sampling, EpisodeSlot], Awaitable[Episode]]
"""Runs one episode of a prompt with an engine, and reports each sample of the engine to its slot as it ends. Cancelling
it aborts what it has in the engine. Raises EpisodeFailed if the group has to be dropped."""


@dataclass(frozen=True)
class Ended:
    """The episodes of a lease that ended, in the order of its requests, and how many did not."""

    episodes: list[Episode]
    cancelled: int = 0
    """Episodes that were cancelled because enough others had ended."""
    failed: int = 0


async def first_of(tasks: Sequence[asyncio.Task[Episode]], enough: int) -> Ended:
    """The episodes of the tasks, as soon as there are `enough`; the other tasks are cancelled. Tasks that raise
    EpisodeFailed are left out, unless too few remain: then it is raised."""
    pending, failures = set(tasks), list[EpisodeFailed]()
    while pending and len(tasks) - len(pending) - len(failures) < enough:
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            error = task.exception()
            if isinstance(error, EpisodeFailed):
                failures.append(error)
            elif error is not None:
                raise error
        if len(tasks) - len(failures) < enough:
            raise failures[0]
    for task in pending:
        task.cancel()
    done = [task.result() for task in tasks if task not in pending and task.exception() is None]
    return Ended(done, len(pending), len(failures))


async def single_turn(engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot) -> Episode:
    """The episode of a job without an environment: one answer to the prompt."""
    rendered = prompt.rendered
    shown = ShownImages(rendered.images, rendered.short_ids) if rendered.images else None
    try:
        return Episode.of(await slot.answer(engine, rendered.token_ids, sampling, shown))
    except BadRow as error:
        raise EpisodeFailed(Drop(DropReason.BAD_PROMPT, str(error))) from error


@dataclass(frozen=True)
class GroupGenerator:
    """Generates and scores the groups of one job with one engine."""

    member_id: MemberId
    engine: Engine
    job: Job
    run_episode: RunEpisode = single_turn
    most_episodes: int | None = None
    """Episodes that can be open at the same time; None: as many as the engine has slots. Episodes that leave their slot
    while they wait need a number."""

    def episode_limit(self) -> EpisodeLimit | None:
        """The limit of the episodes that go on at once; None if an episode is one answer. Half as many as the engine
        has slots always fit: its capacity counts with half of the longest sequence for each."""
        if self.most_episodes is None:
            return None
        return EpisodeLimit(self.most_episodes, least=max(1, min(self.most_episodes, self.engine.capacity // 2)))

    async def answer(self, lease: work_pb2.Lease, arrived: float, slots: Slots) -> common_pb2.Group | Drop:
        """The group of `lease`, or why there is none. `arrived`: time.monotonic() when the lease arrived. `slots`: of
        the lease's episodes. Cancelling aborts the samples in the engine. Raises EngineDied, Unavailable if nothing
        can be scored any more."""
        try:
            with RECORDER.span(SpanKind.RENDER):
                prompt = await self.job.prompt(lease)
        except BadRow as error:
            return Drop(DropReason.BAD_PROMPT, str(error))
        if prompt.rendered.dropped is not None:
            return prompt.rendered.dropped
        asked = lease.sampling
        requests, enough, greedy = requests_of(asked), asked.min_samples or None, asked.greedy_baseline
        try:
            ended = await self.episodes(prompt, requests, slots, enough=enough, greedy=greedy)
        except EpisodeFailed as error:
            return error.drop
        episodes = ended.episodes
        if not all(np.isfinite(completion.logprobs).all() for episode in episodes for completion in episode.samples):
            return Drop(DropReason.BAD_LOGPROBS, "a log-probability is not finite")
        generated = time.monotonic()
        count = len(episodes) - greedy
        with RECORDER.span(SpanKind.SCORE) as scoring:
            scoring.figures["answers"] = float(len(episodes))
            scores, of_teacher = await asyncio.gather(
                self._scores(prompt, episodes, lease.purpose),
                self._teacher_scores(prompt, episodes[:count], lease.purpose),
            )
        if isinstance(scores, Drop):
            return scores
        if isinstance(of_teacher, Drop):
            return of_teacher
        if lease.purpose != common_pb2.PURPOSE_TRAIN:  # the trainer replays expert routing only for what it trains
            episodes = [episode.without_experts() for episode in episodes]
        group = self._group(lease, prompt, episodes[:count], scores[:count])
        for trajectory, token_scores in zip(group.trajectories, of_teacher, strict=False):
            trajectory.teacher.CopyFrom(token_scores)
        if greedy:
            if (failure := scores[count].failure) is not None:
                return Drop(DropReason.REWARD_FAILED, failure)
            group.greedy_reward = scores[count].score or 0.0
        group.cancelled_episodes, group.failed_episodes = ended.cancelled, ended.failed
        group.generate_s, group.score_s = generated - arrived, time.monotonic() - generated
        return group

    async def episodes(
        self,
        prompt: Prompt,
        requests: Sequence[Sampling],
        slots: Slots | None = None,
        *,
        enough: int | None = None,
        greedy: bool = False,
    ) -> Ended:
        """One episode for each request. Each asks the engine by itself, so that it can be aborted and gets its own
        versions; the engine's prefix cache shares the prompt between them.

        As soon as `enough` have ended, the others are cancelled; `greedy`: the last one is needed besides. Raises
        EpisodeFailed if too few can end.
        """
        taken = slots or Slots(len(requests))

        async def one(number: int, sampling: Sampling) -> Episode:
            with taken.episode(number) as slot:
                episode = await self.run_episode(self.engine, prompt, sampling, slot)
                if episode.account is not None:
                    slot.record(episode.account)
                return episode

        tasks = [asyncio.create_task(one(number, sampling)) for number, sampling in enumerate(requests)]
        try:
            count = len(tasks) - greedy
            ended = await first_of(tasks[:count], count if enough is None else enough)
            return replace(ended, episodes=[*ended.episodes, *await asyncio.gather(*tasks[count:])])
        finally:
            for task in tasks:
                task.cancel()

    async def _scores(
        self, prompt: Prompt, episodes: Sequence[Episode], purpose: common_pb2.Purpose
    ) -> list[Scored] | Drop:
        """The scores of the episodes: those of their environment, or of the reward function if it gave none."""
        unscored = [episode for episode in episodes if episode.scored is None]
        answers = [Answer(episode.answer, episode.conversation(prompt.text)) for episode in unscored]
        found = iter(await self.job.reward.score_group(prompt.row, answers))
        scores = [next(found) if episode.scored is None else episode.scored for episode in episodes]
        if any(score.failure is not None for score in scores):
            return scores  # the coordinator drops the group, and keeps the answer that could not be scored
        parts = self.job.spec.reward.parts if purpose == common_pb2.PURPOSE_TRAIN else []
        try:
            for score in scores:
                separate_rewards(score.score or 0.0, score.details, parts)
        except BadOutcome as error:
            return Drop(DropReason.REWARD_FAILED, str(error))
        return scores

    async def _teacher_scores(
        self, prompt: Prompt, episodes: Sequence[Episode], purpose: common_pb2.Purpose
    ) -> list[common_pb2.TokenScores] | Drop:
        """The teacher's scores of the episodes' trajectories, in order; none if nothing is distilled."""
        if self.job.teacher is None or purpose != common_pb2.PURPOSE_TRAIN:
            return []
        trajectories = [message for episode in episodes for message in episode.messages()]
        try:
            return await self.job.teacher.scores(arrays.pack_tokens(prompt.rendered.token_ids), trajectories)
        except (InvalidRequest, ValueError) as error:
            return Drop(DropReason.BAD_LOGPROBS, f"the teacher: {error}")

    def _group(
        self, lease: work_pb2.Lease, prompt: Prompt, episodes: list[Episode], scores: list[Scored]
    ) -> common_pb2.Group:
        sizes = [len(episode.trajectories) for episode in episodes]
        return common_pb2.Group(
            job_id=lease.ref.job_id,
            prompt_id=lease.prompt_id,
            purpose=lease.purpose,
            data_source=lease.data_source,
            prompt_tokens=arrays.pack_tokens(prompt.rendered.token_ids),
            prompt_text=prompt.text,
            question=prompt.row.question,
            ground_truth=lease.ground_truth,
            trajectories=[m for one, score in zip(episodes, scores, strict=True) for m in one.messages(score)],
            episode_trajectories=sizes if max(sizes) > 1 else [],
            member_id=self.member_id,
            engine=self.engine.name,
            traceparent=lease.traceparent,
            issued_s=lease.issued_s,
            images=prompt.row.images,
            image_mark=prompt.image_mark,
        )


def requests_of(asked: work_pb2.Sampling) -> list[Sampling]:
    """The requests for the group's samples, followed by the greedy one of the baseline if it is wanted."""
    sampling = sampling_of(asked)
    greedy = [replace(sampling, temperature=0.0, top_p=1.0, top_k=0)] if asked.greedy_baseline else []
    return [sampling] * asked.samples + greedy


def sampling_of(sampling: work_pb2.Sampling) -> Sampling:
    """The engine's sampling parameters for those on the wire."""
    return Sampling(
        max_response_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        stop=tuple(sampling.stop),
    )


def prefixes(parts: Iterable[work_pb2.Part]) -> dict[int, Partial]:
    """What was sampled before of the response to each request of a lease."""
    return {
        part.request: Partial(
            arrays.unpack_tokens(part.tokens),
            arrays.unpack_logprobs(part.logprobs),
            tuple(VersionSpan(Version(v.version), v.start, v.end) for v in part.versions),
            arrays.reported_experts(part.experts) if part.HasField("experts") else None,
        )
        for part in assembled(parts)
    }


def unreported(responses: Mapping[int, Response]) -> list[work_pb2.Part]:
    """What the responses have got that is not kept by the coordinator."""
    parts = []
    for request, response in responses.items():
        new = response.after(response.kept)
        experts = None if new.experts is None or response.kept_experts else arrays.pack_experts(new.experts)
        if len(new) or experts is not None:
            versions = [common_pb2.VersionSpan(version=v.version, start=v.start, end=v.end) for v in new.versions]
            part = work_pb2.Part(request=request, start=response.kept, versions=versions, experts=experts)
            part.tokens, part.logprobs = arrays.pack_tokens(new.tokens), arrays.pack_logprobs(new.logprobs)
            parts.append(part)
    return parts


def reported(responses: Mapping[int, Response], parts: Iterable[work_pb2.Part]) -> None:
    """The coordinator keeps `parts` now."""
    for part in parts:
        response = responses[part.request]
        response.kept = part.start + tokens_of(part)
        response.kept_experts = response.kept_experts or part.HasField("experts")
