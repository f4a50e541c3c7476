"""From a lease to its answer: the prompt's tokens, n samples generated concurrently, their scores, one group."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.drops import Drop, DropReason
from millrace.errors import BadRow
from millrace.ids import MemberId
from millrace.rewards.outcome import BadOutcome, separate_rewards
from millrace.wire.arrays import pack_experts, pack_logprobs, pack_tokens
from millrace.wire.v1 import common_pb2, work_pb2
from services.rollout.engine import Engine, Sample, Sampling
from services.rollout.scoring.pool import Scored
from services.rollout.work.job import Job, Prompt


@dataclass(frozen=True)
class GroupGenerator:
    """Generates and scores the groups of one job with one engine."""

    member_id: MemberId
    engine: Engine
    job: Job

    async def answer(
        self, lease: work_pb2.Lease, arrived: float, on_sample: Callable[[Sample], None]
    ) -> common_pb2.Group | Drop:
        """The group of `lease`, or why there is none. `arrived`: time.monotonic() when the lease arrived. `on_sample`
        is called with each sample as it ends. Cancelling aborts the samples in the engine. Raises EngineDied,
        Unavailable where nothing can be scored any more."""
        try:
            prompt = await self.job.prompt(lease)
        except BadRow as error:
            return Drop(DropReason.BAD_PROMPT, str(error))
        if prompt.rendered.dropped is not None:
            return prompt.rendered.dropped
        samples = await self.samples(prompt, requests_of(lease.sampling), on_sample)
        if not all(np.isfinite(sample.logprobs).all() for sample in samples):
            return Drop(DropReason.BAD_LOGPROBS, "a log-probability is not finite")
        ended = time.monotonic()
        scores = await self._scores(prompt, samples, lease.purpose)
        if isinstance(scores, Drop):
            return scores
        count = lease.sampling.samples
        if lease.purpose != common_pb2.PURPOSE_TRAIN:  # the trainer replays expert routing only for what it trains
            samples = [replace(sample, experts=None) for sample in samples]
        group = self._group(lease, prompt, samples[:count], scores[:count])
        if lease.sampling.greedy_baseline:
            group.greedy_reward = scores[count].score or 0.0
        group.generate_s, group.score_s = ended - arrived, time.monotonic() - ended
        return group

    async def samples(
        self, prompt: Prompt, requests: Sequence[Sampling], on_sample: Callable[[Sample], None]
    ) -> list[Sample]:
        """One sample for each request. Each is a request of its own to the engine, so that it can be aborted and gets
        its own versions; the engine's prefix cache shares the prompt between them."""

        async def one(sampling: Sampling) -> Sample:
            sample = await self.engine.generate(prompt.rendered.token_ids, sampling)
            on_sample(sample)
            return sample

        tasks = [asyncio.create_task(one(sampling)) for sampling in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _scores(
        self, prompt: Prompt, samples: Sequence[Sample], purpose: common_pb2.Purpose
    ) -> list[Scored] | Drop:
        row, answers = prompt.row, [sample.text for sample in samples]
        scores = await self.job.scoring.score_group(row.data_source, answers, row.ground_truth, row.extra_info)
        if failure := next((score.failure for score in scores if score.failure is not None), None):
            return Drop(DropReason.REWARD_FAILED, failure)
        parts = self.job.spec.reward.parts if purpose == common_pb2.PURPOSE_TRAIN else []
        try:
            for score in scores:
                separate_rewards(score.score or 0.0, score.details, parts)
        except BadOutcome as error:
            return Drop(DropReason.REWARD_FAILED, str(error))
        return scores

    def _group(
        self, lease: work_pb2.Lease, prompt: Prompt, samples: list[Sample], scores: list[Scored]
    ) -> common_pb2.Group:
        return common_pb2.Group(
            job_id=lease.ref.job_id,
            prompt_id=lease.prompt_id,
            purpose=lease.purpose,
            data_source=lease.data_source,
            prompt_tokens=pack_tokens(prompt.rendered.token_ids),
            prompt_text=prompt.text,
            ground_truth=lease.ground_truth,
            trajectories=[trajectory(s, score) for s, score in zip(samples, scores, strict=True)],
            member_id=self.member_id,
            engine=self.engine.name,
        )


def requests_of(asked: work_pb2.Sampling) -> list[Sampling]:
    """The requests for the group's samples, followed by the greedy one of the baseline where it is asked for."""
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


def trajectory(sample: Sample, scored: Scored | None = None) -> common_pb2.Trajectory:
    """A sample and its score as a message."""
    message = common_pb2.Trajectory(
        tokens=pack_tokens(sample.tokens),
        logprobs=pack_logprobs(sample.logprobs),
        versions=[common_pb2.VersionSpan(version=v.version, start=v.start, end=v.end) for v in sample.versions],
        stop_reason=sample.stop_reason.value,
        text=sample.text,
        experts=None if sample.experts is None else pack_experts(sample.experts),
    )
    if scored is not None and scored.score is not None:
        message.reward = scored.score
        message.reward_details = json.dumps(scored.details) if scored.details else ""
    return message
