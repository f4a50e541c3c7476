"""From a lease to its answer: tokens of the prompt, n samples beside each other, their scores, one group."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.errors import BadRow
from millrace.ids import MemberId
from millrace.rewards.outcome import BadOutcome, separate_rewards
from millrace.wire.arrays import pack_experts, pack_logprobs, pack_tokens
from millrace.wire.v1 import common_pb2, work_pb2
from services.rollout.engine import Engine, Sample, Sampling
from services.rollout.scoring.pool import Scored
from services.rollout.work.job import Job, Prompt


@dataclass(frozen=True)
class Dropped:
    """There will be no group; the ledger gets the reason."""

    reason: str


@dataclass(frozen=True)
class Bench:
    """What a group is made with."""

    member_id: MemberId
    engine: Engine
    job: Job

    async def answer(
        self, lease: work_pb2.Lease, arrived: float, sampled: Callable[[Sample], None]
    ) -> common_pb2.Group | Dropped:
        """The group of `lease`, which arrived at `arrived` (time.monotonic). `sampled` is called with each sample as it
        ends. Cancelling aborts the samples in the engine."""
        try:
            prompt = await self.job.prompt(lease)
        except BadRow as error:
            return Dropped(f"prompt: {error}")
        if prompt.rendered.dropped is not None:
            return Dropped(prompt.rendered.dropped)
        samples = await self.samples(prompt, requests_of(lease.sampling), sampled)
        if not all(np.isfinite(sample.logprobs).all() for sample in samples):
            return Dropped("engine: a log-probability is not finite")
        ended = time.monotonic()
        row, answers = prompt.row, [sample.text for sample in samples]
        scores = await self.job.scoring.score_group(row.data_source, answers, row.ground_truth, row.extra_info)
        if failure := next((score.failure for score in scores if score.failure is not None), None):
            return Dropped(f"reward: {failure}")
        parts = self.job.spec.reward.parts if lease.purpose == common_pb2.PURPOSE_TRAIN else []
        try:
            for score in scores:
                separate_rewards(score.score or 0.0, score.details, parts)
        except BadOutcome as error:
            return Dropped(f"reward: {error}")
        count = lease.sampling.samples
        if lease.purpose != common_pb2.PURPOSE_TRAIN:  # nobody replays what is not trained
            samples = [replace(sample, experts=None) for sample in samples]
        group = self._group(lease, prompt, samples[:count], scores[:count])
        if lease.sampling.greedy_baseline:
            group.greedy_reward = scores[count].score or 0.0
        group.generate_s, group.score_s = ended - arrived, time.monotonic() - ended
        return group

    async def samples(
        self, prompt: Prompt, requests: Sequence[Sampling], sampled: Callable[[Sample], None]
    ) -> list[Sample]:
        """One sample a request: each can be aborted and is versioned alone, and the engine's prefix cache shares the
        prompt between them."""

        async def one(sampling: Sampling) -> Sample:
            sample = await self.engine.generate(prompt.rendered.token_ids, sampling)
            sampled(sample)
            return sample

        tasks = [asyncio.create_task(one(sampling)) for sampling in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

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
    """The group's, and behind them the greedy one of the baseline where one is asked for."""
    sampling = sampling_of(asked)
    greedy = [replace(sampling, temperature=0.0, top_p=1.0, top_k=0)] if asked.greedy_baseline else []
    return [sampling] * asked.samples + greedy


def sampling_of(sampling: work_pb2.Sampling) -> Sampling:
    return Sampling(
        max_response_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        stop=tuple(sampling.stop),
    )


def trajectory(sample: Sample, scored: Scored | None = None) -> common_pb2.Trajectory:
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
