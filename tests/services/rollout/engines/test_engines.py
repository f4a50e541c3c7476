"""The contract of every engine, on tied and untied embeddings, in float32 and bfloat16, with whole weights and with an
adapter published apart from them: samples, log-probabilities, versions, weights."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidJob, InvalidState, PublicationFailed
from millrace.ids import Version
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Content, Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.wire_layouts import Planner, encode
from millrace.weights.transfer.channels.rendezvous import Rendezvous, serve_store
from millrace.weights.transfer.delta.exchange import Snapshot
from millrace.weights.transfer.pipeline import ReceivePipeline
from millrace.weights.transfer.session import PublicationSession
from services.rollout.engine import (
    Completion,
    Engine,
    EngineDied,
    EngineStats,
    Response,
    Sampling,
    StopReason,
    joined,
)
from services.rollout.engines import create
from services.rollout.weights.engine_weights import CommitReport
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Received
from tests.adapters import published, with_adapter
from tests.layouts import packed_by, whole_layout
from tests.models import byte_tokenizer, random_model
from tests.sender import Sender, export
from tests.services.rollout.conftest import Run
from tests.services.rollout.engine_sequences import skip_without
from tests.services.rollout.engines.marked import marked_and_reported
from tests.services.rollout.jobs import adapter_job, job_spec
from tests.services.rollout.parameters import engine_parameters
from tests.services.rollout.reference import greedy_prompt, logits, logprobs
from tests.shard_sender import Shards, ShardSender

pytestmark = pytest.mark.slow

END_OF_TURN = 258
RANK = 32
"""Of adapters: large enough for several rounds of messages."""
PROMPT = [257, *b"a question of some length", 258]
# Longer than one block of the prefix cache of vLLM's CPU build, so that later samples reuse its keys and values.
LONG_PROMPT = [257, *(b"0123456789" * 15)]
EDGE = 1e-5
"""Rounding decides whether a token is kept by top-p if the mass before it is as close to top-p."""


@dataclass
class Case:
    engine: Engine
    tied: bool
    dtype: torch.dtype
    version: int = 0
    model: Any = None
    base: Any = None
    """The model without its adapter, which is in place; None where whole models are published."""

    @property
    def content(self) -> Content:
        return Content.MODEL if self.base is None else Content.ADAPTER

    def tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """What is published of a model."""
        return export(model) if self.base is None else published(model)

    def sender(self, model: Any, version: int, **options: Any) -> Sender:
        return Sender(self.tensors(model), version=version, content=self.content, **options)

    def shards(self, model: Any) -> Shards:
        return Shards(self.tensors(model), content=self.content)

    async def publish_base(self) -> None:
        """From here on versions are adapters of one random model."""
        base = random_model(tied=self.tied, seed=1000, dtype=self.dtype)
        await self.receive(Sender(export(base), version=1, content=Content.BASE))
        await self.engine.commit(None, "recompute")
        self.base = base

    async def publish(self, *, cache_policy: str = "recompute") -> CommitReport:
        """Publishes the next version: a random model of its own."""
        self.version += 1
        model = self.random_model(self.version)
        sender = self.sender(model, self.version)
        await self.receive(sender)
        swap = await self.engine.commit(sender.request.version, cache_policy)  # type: ignore[arg-type]
        self.model = model
        return swap

    async def shard_sender(self, mode: int, **options: Any) -> ShardSender:
        """A sender of the next version."""
        if self.engine.device != "cpu":
            pytest.skip("this sender's shards are on the CPU: shards go from GPU to GPU, see tests/gpu")
        self.version += 1
        self.model = self.random_model(self.version)
        shards = self.shards(self.model)
        wanted = await self.engine.describe(shards.manifest)
        return ShardSender(shards, wanted, version=self.version, mode=mode, **options)  # type: ignore[arg-type]

    async def delta_sender(self, mode: int, snapshots: list[Snapshot], base: str) -> ShardSender:
        """A sender of what changed in the next version: one element of fifty. `snapshots` are filled at first; `base`:
        key of the publication before."""
        if self.engine.device != "cpu":
            pytest.skip("this sender's shards are on the CPU")
        self.version += 1
        random = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter[torch.rand(parameter.shape, generator=random) < 0.02] *= 1.5
        shards = self.shards(self.model)
        wanted, options = await self.engine.describe(shards.manifest), {"version": self.version, "mode": mode}
        if not snapshots:
            plan = ShardSender(shards, wanted, **options).plan  # type: ignore[arg-type]
            for rank in range(plan.senders):
                sizes = {content: int(plan.sizes[content]) for content in packed_by(plan, rank).tolist()}
                snapshots.append(Snapshot(plan.hash, sizes, torch.device("cpu")))
        return ShardSender(shards, wanted, snapshots=snapshots, base=base, **options)  # type: ignore[arg-type]

    async def publish_shards(self, mode: int) -> CommitReport:
        """The same as `publish`, from two ranks with half of the rows each."""
        sender = await self.shard_sender(mode)
        await self.receive(sender)
        return await self.engine.commit(sender.request.version, "recompute")

    def random_model(self, seed: int) -> Any:
        if self.base is not None:
            return with_adapter(self.base, seed=seed, rank=RANK, alpha=RANK)
        return random_model(tied=self.tied, seed=seed, dtype=self.dtype)

    def agrees(self, reported: Any, expected: Any) -> bool:
        """Whether log-probabilities are the same: float32 by the largest difference, bfloat16 by the mean KL; on GPUs,
        where kernels multiply float32 with fewer bits, by a mean KL a thousand times smaller."""
        difference = np.asarray(expected, dtype=np.float64) - np.asarray(reported, dtype=np.float64)
        if self.dtype == torch.float32 and self.engine.device == "cpu":
            return bool(np.abs(difference).max(initial=0.0) < 1e-3)
        # Rounding moves a token that lies on the edge of top-k or top-p to the other side now and then.
        kept = difference[np.isfinite(difference)]
        bound = 0.01 if self.dtype == torch.bfloat16 else 1e-5
        return len(kept) >= 0.9 * len(difference) and bool((np.exp(kept) - 1 - kept).sum() <= bound * len(kept))

    def agrees_with_all(self, samples: list[Completion], sampling: dict[str, Any]) -> bool:
        """Whether samples of PROMPT agree with the model. One by one would be too strict: a token of three that lies on
        the edge is a third of an answer that ends soon."""
        reported, top_p = np.concatenate([sample.logprobs for sample in samples]), sampling.get("top_p", 1.0)
        edges = [top_p] if top_p == 1.0 else [top_p - EDGE, top_p, top_p + EDGE]
        expected = np.stack(
            [
                np.concatenate(
                    [logprobs(self.model, PROMPT, sample.tokens, **sampling | {"top_p": edge}) for sample in samples]
                )
                for edge in edges
            ]
        )
        closest = np.abs(expected - reported).argmin(0)
        return self.agrees(reported, expected[closest, np.arange(len(reported))])

    async def receive(self, sender: Sender | ShardSender) -> Received:
        await self.engine.prepare_receive(sender.request)
        sender.start()
        await self.engine.begin_receive()
        return await self.receive_rest(sender)

    async def receive_rest(self, sender: Sender | ShardSender) -> Received:
        sender.release()
        reception = await self.engine.received()
        sender.join()
        expected = sender.sums if isinstance(sender, ShardSender) else dict(enumerate(sender.checksums))
        assert dict(reception.checksums) == expected
        return reception

    async def samples(self, count: int, prompt: list[int], **sampling: Any) -> list[Completion]:
        wanted = Sampling(**({"max_response_tokens": 32} | sampling))
        return list(await asyncio.gather(*(self.engine.generate(prompt, wanted) for _ in range(count))))


class WholeReceiver:
    """A sibling of one worker that wants every tensor whole; it comes when it is told to."""

    def __init__(self, manifest: Manifest, held: Sequence[Boxes]) -> None:
        buffers = [torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors]
        self.tensors = {info.name: buffer for info, buffer in zip(manifest.tensors, buffers, strict=True)}
        self._memory = Memory(manifest, whole_layout(manifest), buffers)
        wanted = [self._memory.layout.boxes]
        sides = weights_pb2.Sides(senders=encode(held), receivers=encode(wanted), message_bytes=16384)
        self._plan = Planner().plan(manifest, sides)
        self._store, port = serve_store("127.0.0.1", 2, 30.0)
        self.request = TransferRequest(
            key="job-test/1/2/0",
            version=Version(1),
            manifest=manifest,
            host="127.0.0.1",
            port=port,
            world_size=2,
            first_rank=0,
            timeout_s=30.0,
            path=weights_pb2.PATH_SHARDED,
            layouts=sides,
            communicator="copy",
            leave_after=True,
        )

    def receive(self) -> Any:
        at, session = self.request, PublicationSession()
        rendezvous = Rendezvous(
            at.host, at.port, at.communicator, 1, at.world_size, b"", torch.device("cpu"), at.timeout_s
        )
        receiving = ReceivePipeline(self._plan, 1, self._memory, staged=False)
        try:
            return session.run(rendezvous, at.key, time.monotonic() + at.timeout_s, receiving.run)
        finally:
            session.leave()


CASES: list[Any] = [
    "transformers-tied-float32",
    "transformers-untied-bfloat16",
    pytest.param("vllm-tied-float32", marks=pytest.mark.e2e),
    # an untied head in vLLM, and bfloat16: tests/services/trainer/backends/megatron/test_vllm.py has them too
    pytest.param("vllm-untied-bfloat16", marks=[pytest.mark.e2e, pytest.mark.matrix]),
    pytest.param("sglang-tied-bfloat16", marks=pytest.mark.gpu),
    pytest.param("sglang-untied-bfloat16", marks=pytest.mark.gpu),
    "transformers-tied-float32-adapter",
    pytest.param("vllm-untied-bfloat16-adapter", marks=[pytest.mark.e2e, pytest.mark.matrix]),
    pytest.param("sglang-tied-bfloat16-adapter", marks=pytest.mark.gpu),
]
OF_WEIGHTS = ("transformers-untied-bfloat16", "transformers-tied-float32-adapter")
of_requests = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.matrix) if case in OF_WEIGHTS else case for case in CASES],
    indirect=True,
    scope="module",
)
"""For what an engine does with requests, whatever its weights are: `make test` has it with one kind of each engine."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, run: Run, tied_model: Path, untied_model: Path) -> Iterator[Case]:
    name, embeddings, dtype, *adapter = request.param.split("-")
    skip_without(name)
    tied = embeddings == "tied"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets a test look into the worker's memory
    engine = create(name)
    make_job = partial(adapter_job, rank=RANK) if adapter else job_spec
    run(engine.start(make_job(tied_model if tied else untied_model, name, rollout={"dtype": dtype})))
    case = Case(engine, tied, getattr(torch, dtype))
    if adapter:
        run(case.publish_base())
    run(case.publish())
    yield case
    run(engine.stop())


def test_engine_tells_what_it_is(case: Case) -> None:
    engine = case.engine
    assert (engine.world_size, engine.dtype, engine.capacity) == (1, str(case.dtype).removeprefix("torch."), 16)
    assert (engine.device == "cpu") is not torch.cuda.is_available()
    assert engine.release


def test_samples_of_a_prompt_are_drawn_apart(case: Case, run: Run) -> None:
    samples = run(case.samples(8, PROMPT))
    assert len({tuple(s.tokens) for s in samples}) == 8
    for sample in samples:
        assert 1 <= len(sample.tokens) <= 32
        assert len(sample.logprobs) == len(sample.tokens)
        assert [(v.version, v.start, v.end) for v in sample.versions] == [(case.version, 0, len(sample.tokens))]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20}, {"top_k": 50, "top_p": 0.5}],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(case: Case, run: Run, sampling: dict[str, Any]) -> None:
    assert case.agrees_with_all(run(case.samples(6, PROMPT, **sampling)), sampling)


@of_requests
def test_requests_of_different_sampling_do_not_mix(case: Case, run: Run) -> None:
    mixed = [{"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.8}, {"temperature": 1.0}, {"top_k": 5}]

    async def both() -> list[list[Completion]]:
        return list(await asyncio.gather(*(case.samples(3, PROMPT, **sampling) for sampling in mixed)))

    for sampling, samples in zip(mixed, run(both()), strict=True):
        assert case.agrees_with_all(samples, sampling)


def test_temperature_zero_is_greedy(case: Case, run: Run) -> None:
    first, second = run(case.samples(2, PROMPT, temperature=0.0, max_response_tokens=12))
    assert list(first.tokens) == list(second.tokens)
    rounding = 1e-4 if case.dtype == torch.float32 else 0.2
    for i, token in enumerate(first.tokens):
        row = logits(case.model, [*PROMPT, *first.tokens[:i]])[-1]
        assert row[token] >= row.max() - rounding
    assert case.agrees(first.logprobs, logprobs(case.model, PROMPT, first.tokens))


@of_requests
def test_answer_may_be_empty(case: Case, run: Run) -> None:
    prompt = greedy_prompt(case.model, END_OF_TURN)
    (sample,) = run(case.samples(1, prompt, temperature=0.0))
    assert list(sample.tokens) == [END_OF_TURN]
    assert (sample.text, sample.stop_reason) == ("", StopReason.END_OF_TURN)


@of_requests
def test_end_of_turn_is_the_last_token(case: Case, run: Run) -> None:
    samples = run(case.samples(48, PROMPT, max_response_tokens=100))
    ended = [s for s in samples if s.stop_reason is StopReason.END_OF_TURN]
    assert ended
    for sample in samples:
        assert END_OF_TURN not in sample.tokens[:-1]
        assert (sample.tokens[-1] == END_OF_TURN) == (sample.stop_reason is StopReason.END_OF_TURN)


@of_requests
def test_text_is_the_tokens_without_specials_whatever_bytes_they_are(case: Case, run: Run) -> None:
    tokenizer = byte_tokenizer()
    for prompt in (PROMPT, [257, *"naïve 漢字 🦆".encode()]):
        for sample in run(case.samples(6, prompt)):
            assert sample.text == tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)


@of_requests
def test_stop_string_ends_a_sample_and_is_not_in_its_text(case: Case, run: Run) -> None:
    (whole,) = run(case.samples(1, PROMPT, temperature=0.0, max_response_tokens=60))
    stop = whole.text[4:6]
    at = whole.text.index(stop)
    (stopped,) = run(case.samples(1, PROMPT, temperature=0.0, max_response_tokens=60, stop=("never to be", stop)))
    assert stopped.stop_reason is StopReason.STOP_STRING
    assert stopped.text == whole.text[:at]
    assert list(stopped.tokens) == list(whole.tokens[: len(stopped.tokens)])
    assert len(stopped.logprobs) == len(stopped.tokens) < len(whole.tokens)


SAMPLINGS = {
    "length": Sampling(24, temperature=0.0),
    "stop string": Sampling(40, temperature=0.0, stop=("never to be", "?")),
    "context": Sampling(500, temperature=0.0),
}


@pytest.mark.parametrize("ending", SAMPLINGS)
@of_requests
def test_a_continued_answer_is_the_one_without_a_cut(case: Case, run: Run, ending: str) -> None:
    prompt = [257, *b"x" * 379] if ending == "context" else PROMPT
    sampling = SAMPLINGS[ending]
    (whole,) = run(case.samples(1, prompt, temperature=0.0, max_response_tokens=40))
    if ending == "stop string":
        # Of several tokens: some cuts are inside it.
        sampling = replace(sampling, stop=("never to be", whole.text[9:14]))
    whole = run(case.engine.generate(prompt, sampling))
    assert ending != "stop string" or whole.stop_reason is StopReason.STOP_STRING
    counts = range(1, len(whole.tokens) + 1)

    async def continued() -> list[Completion]:
        prefixes = [Response(whole.partial.first(count)) for count in counts]
        return list(await asyncio.gather(*(case.engine.generate(prompt, sampling, one) for one in prefixes)))

    for count, sample in zip(counts, run(continued()), strict=True):
        assert (sample.carried, sample.versions) == (count, whole.versions)
        assert list(sample.logprobs[:count]) == list(whole.logprobs[:count])
        if case.dtype == torch.float32 and case.engine.device == "cpu":
            assert list(sample.tokens) == list(whole.tokens)
            assert (sample.text, sample.stop_reason) == (whole.text, whole.stop_reason)
            assert np.abs(sample.logprobs - whole.logprobs).max() < 1e-3


@of_requests
def test_a_prefix_that_is_a_whole_answer_is_the_answer(case: Case, run: Run) -> None:
    samples = run(case.samples(48, PROMPT, max_response_tokens=100))
    ended = next(s for s in samples if s.stop_reason is StopReason.END_OF_TURN)
    again = run(case.engine.generate(PROMPT, Sampling(100), Response(ended.partial)))
    assert (list(again.tokens), list(again.logprobs)) == (list(ended.tokens), list(ended.logprobs))
    assert (again.text, again.stop_reason, again.versions) == (ended.text, ended.stop_reason, ended.versions)


@of_requests
def test_no_token_of_a_response_is_forgotten_while_it_ends(case: Case, run: Run) -> None:
    """It is looked at in every round of the event loop, from its first token until its completion is made."""

    async def followed() -> None:
        response, lengths = Response(), list[int]()
        asked = asyncio.create_task(case.engine.generate(PROMPT, Sampling(40, temperature=2.0), response))
        while not asked.done():
            await asyncio.sleep(0)
            lengths.append(len(response.after(0)))
        assert lengths == sorted(lengths) and lengths[-1] == len((await asked).tokens)

    for _ in range(5):
        run(followed())


def test_an_answer_is_followed_and_continued_under_other_weights(case: Case, run: Run) -> None:
    before, first = case.model, case.version
    parts = []

    async def cut() -> None:
        sampling = Sampling(200, temperature=2.0)
        responses = [Response() for _ in range(8)]
        asked = [asyncio.create_task(case.engine.generate(LONG_PROMPT, sampling, one)) for one in responses]
        for least in (3, 12):
            found = [one.after(0) for one in responses]
            while max(map(len, found)) < least:
                await asyncio.sleep(0.001)
                found = [one.after(0) for one in responses]
            parts.append(found)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    run(cut())
    for early, late in zip(*parts, strict=True):
        assert list(early.tokens) == list(late.first(len(early)).tokens)
        assert joined(early.versions, late.after(len(early)).versions) == late.versions
    run(case.publish())

    async def go_on() -> list[Completion]:
        responses = [Response(part) for part in parts[1]]
        sampling = Sampling(200, temperature=2.0)
        samples = await asyncio.gather(*(case.engine.generate(LONG_PROMPT, sampling, one) for one in responses))
        for sample, response in zip(samples, responses, strict=True):
            assert list(response.after(0).tokens) == list(sample.tokens)
            assert list(response.after(sample.carried + 1).tokens) == list(sample.tokens[sample.carried + 1 :])
        return samples

    for part, sample in zip(parts[1], run(go_on()), strict=True):
        assert sample.carried == len(part) and list(sample.tokens[: len(part)]) == list(part.tokens)
        spans = [(first, 0, len(part)), (case.version, len(part), len(sample.tokens))]
        assert [(v.version, v.start, v.end) for v in sample.versions] == [span for span in spans if span[1] < span[2]]
        old = logprobs(before, LONG_PROMPT, sample.tokens, temperature=2.0)
        new = logprobs(case.model, LONG_PROMPT, sample.tokens, temperature=2.0)
        assert case.agrees(sample.logprobs, [*old[: len(part)], *new[len(part) :]])


@of_requests
def test_context_ends_a_sample(case: Case, run: Run) -> None:
    prompt = [257, *b"x" * 379]  # of the 400 tokens that prompt and response may have
    samples = run(case.samples(8, prompt, max_response_tokens=500))
    assert any(s.stop_reason is StopReason.LENGTH for s in samples)
    for sample in samples:
        assert len(sample.tokens) <= 20
        assert sample.stop_reason is StopReason.END_OF_TURN or len(sample.tokens) == 20
        assert case.agrees(sample.logprobs, logprobs(case.model, prompt, sample.tokens))


@of_requests
def test_cancelling_aborts_in_the_engine_and_leaves_the_others(case: Case, run: Run) -> None:
    async def scenario() -> list[Completion]:
        sampling = Sampling(max_response_tokens=200)
        tasks = [asyncio.create_task(case.engine.generate(PROMPT, sampling)) for _ in range(12)]
        await asyncio.sleep(0.05)
        for task in tasks[:6]:
            task.cancel()
        left = await asyncio.gather(*tasks[6:])
        async with asyncio.timeout(60):
            while (load := case.engine.load()).running + load.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return left

    for sample in run(scenario()):
        assert case.agrees(sample.logprobs, logprobs(case.model, PROMPT, sample.tokens))


@of_requests
def test_more_requests_than_fit_wait_their_turn(case: Case, run: Run) -> None:
    async def scenario() -> tuple[list[Completion], list[tuple[int, int]], list[EngineStats]]:
        seen: list[tuple[int, int]] = []
        told: list[EngineStats] = []
        asking = asyncio.gather(
            *(case.engine.generate(PROMPT, Sampling(max_response_tokens=24)) for _ in range(3 * case.engine.capacity))
        )
        while not asking.done():
            load = case.engine.load()
            seen.append((load.running, load.waiting))
            if (stats := case.engine.stats()) is not None:
                told.append(stats)
            await asyncio.sleep(0.01)
        samples = await asking
        async with asyncio.timeout(60):
            while (left := case.engine.stats()) and (left.running or left.waiting or left.cache_used):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the engine tells nobody
        return samples, seen, told

    samples, seen, told = run(scenario())
    assert len(samples) == 3 * case.engine.capacity
    assert max(running for running, _ in seen) <= case.engine.capacity
    assert max(waiting for _, waiting in seen) > 0
    # The engine's own account: the queue, and the cache, which is empty again by now.
    assert max(one.waiting for one in told) > 0
    assert 0 < max(one.running for one in told) <= case.engine.capacity
    assert 0.0 < max(one.cache_used for one in told) <= 1.0


async def _across_a_swap(case: Case, cache_policy: str) -> tuple[Any, Any, list[Completion]]:
    """Publishes while samples are in flight, held up between two tensors: old model, new model, the samples. Publishes
    again, at most ten times, if all samples ended before the swap."""
    for _ in range(10):
        old, new, samples = await _publish_among_samples(case, cache_policy)
        if any(len(sample.versions) == 2 for sample in samples):
            return old, new, samples
    raise AssertionError("no sample was in flight across ten swaps")


async def _publish_among_samples(case: Case, cache_policy: str) -> tuple[Any, Any, list[Completion]]:
    old = case.model
    case.version += 1
    new = case.random_model(case.version)
    sender = case.sender(new, case.version, hold_after=5)
    sampling = Sampling(max_response_tokens=200)
    flying = asyncio.gather(*(case.engine.generate(LONG_PROMPT, sampling) for _ in range(12)))
    await case.engine.prepare_receive(sender.request)
    sender.start()
    await case.engine.begin_receive()
    async with asyncio.timeout(60):
        while not case.engine.load().running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await case.receive_rest(sender)
    await case.engine.commit(sender.request.version, cache_policy)  # type: ignore[arg-type]
    case.model = new
    return old, new, list(await flying)


def test_versions_are_true_across_a_swap_and_logprobs_match_each(case: Case, run: Run) -> None:
    old, new, samples = run(_across_a_swap(case, "recompute"))
    crossing = [s for s in samples if len(s.versions) == 2]
    apart: list[float] = []
    for sample in crossing:
        before, after = sample.versions
        assert (before.start, before.end, after.end) == (0, after.start, len(sample.tokens))
        assert (before.version, after.version) == (case.version - 1, case.version)
        under_old, under_new = (logprobs(m, LONG_PROMPT, sample.tokens) for m in (old, new))
        assert case.agrees(sample.logprobs[: before.end], under_old[: before.end])
        assert case.agrees(sample.logprobs[before.end :], under_new[before.end :])
        apart.append(float(np.abs(under_old - under_new)[before.end]))
    # The two models are far apart there: a version that is wrong by one token would show.
    assert np.median(apart) > 1e-2


def test_versions_that_we_mark_are_those_that_vllm_reports(
    case: Case, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way for releases of vLLM that report none, beside one that does."""
    if case.engine.name != "vllm":
        pytest.skip("only vLLM reports versions by itself")
    marked, reported = marked_and_reported(case.engine, monkeypatch)
    _, _, samples = run(_across_a_swap(case, "recompute"))
    assert marked == reported
    assert {s.versions for s in samples} <= set(reported)


def test_kept_cache_makes_a_difference_that_ends_with_the_samples_in_flight(
    case: Case, run: Run, record_property: Any
) -> None:
    old, new, samples = run(_across_a_swap(case, "keep"))
    crossing = [s for s in samples if len(s.versions) == 2]
    apart = []
    for sample in crossing:
        at = sample.versions[0].end
        under_old, under_new = (logprobs(m, LONG_PROMPT, sample.tokens) for m in (old, new))
        assert case.agrees(sample.logprobs[:at], under_old[:at])
        apart.append(np.abs(sample.logprobs - under_new)[at:])
    record_property("kept_cache_mean_abs_logprob_difference", float(np.concatenate(apart).mean()))
    assert np.concatenate(apart).max() > 0.1
    # A new request of the same prompt must not find keys and values of the old version.
    for sample in run(case.samples(4, LONG_PROMPT)):
        assert case.agrees(sample.logprobs, logprobs(new, LONG_PROMPT, sample.tokens))


def skip_adapters(case: Case) -> None:
    if case.base is not None:
        pytest.skip("this reads the model's own parameters; test_vllm_adapters.py compares those of adapters")


def test_every_tensor_in_the_engine_is_the_senders_bit_for_bit(case: Case, run: Run) -> None:
    skip_adapters(case)
    swap = run(case.publish())
    held = run(engine_parameters(case.engine))
    sent = export(case.model)
    if case.tied:  # engines save either name of the two
        held["model.embed_tokens.weight"] = held.pop("lm_head.weight", held.get("model.embed_tokens.weight"))
    assert set(held) == set(sent)
    for name, tensor in sent.items():
        assert held[name].dtype == tensor.dtype == case.dtype
        assert torch.equal(held[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name
    assert swap.placed.loader_tensors == len(sent)
    assert swap.pause_s > swap.placed.apply_s > 0


@pytest.mark.parametrize("mode", [weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE])
def test_a_sharded_publication_is_the_oracle_bit_for_bit(case: Case, run: Run, mode: int) -> None:
    skip_adapters(case)

    async def published() -> None:
        swap = await case.publish_shards(mode)
        assert (swap.mode, swap.placed.loader_tensors, swap.placed.loader_bytes) == (mode, 0, 0)
        shards = await engine_parameters(case.engine)
        broadcast = Sender(export(case.model), version=case.version + 1)
        case.version += 1
        await case.receive(broadcast)
        await case.engine.commit(broadcast.request.version, "recompute")
        oracle = await engine_parameters(case.engine)
        assert shards.keys() == oracle.keys()
        for name, tensor in oracle.items():
            assert torch.equal(shards[name], tensor), name

    run(published())


@pytest.mark.parametrize("mode", [weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE])
def test_changes_alone_make_every_bit_of_the_version(case: Case, run: Run, mode: int) -> None:
    skip_adapters(case)

    async def published() -> None:
        snapshots: list[Snapshot] = []
        base, sent = "", []
        for _ in range(3):
            sender = await case.delta_sender(mode, snapshots, base)
            await case.receive(sender)
            await case.engine.commit(sender.request.version, "recompute")
            base = sender.request.key
            sent.append(sender.sent_bytes)
        assert max(sent[1:]) < 0.2 * sent[0]
        held = await engine_parameters(case.engine)
        await case.receive(broadcast := Sender(export(case.model), version=case.version + 1))
        case.version += 1
        await case.engine.commit(broadcast.request.version, "recompute")
        for name, tensor in (await engine_parameters(case.engine)).items():
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name

    run(published())


def test_what_is_served_is_sent_on_bit_for_bit_while_the_engine_generates(case: Case, run: Run) -> None:
    async def scenario() -> None:
        await case.publish_shards(weights_pb2.COMMIT_MODE_SHADOW)
        manifest = case.shards(case.model).manifest
        sibling = WholeReceiver(manifest, await case.engine.describe(manifest))
        await case.engine.prepare_send(sibling.request, "job-test/1/1/0")
        sampling = asyncio.create_task(case.samples(4, PROMPT, max_response_tokens=60))
        while case.engine.load().running == 0:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)
        sending = asyncio.create_task(case.engine.send(sibling.request))
        await sampling
        assert not sending.done(), "it waits for its sibling during generation"
        got = await asyncio.to_thread(sibling.receive)
        assert dict((await sending).checksums) == dict(got.sums)
        await case.engine.end_send()
        for name, tensor in case.tensors(case.model).items():
            assert torch.equal(sibling.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
        absent = WholeReceiver(manifest, await case.engine.describe(manifest))
        await case.engine.prepare_send(absent.request, "job-test/1/1/0")
        sending = asyncio.create_task(case.engine.send(absent.request))
        await asyncio.sleep(0.2)
        await case.engine.end_send()
        with pytest.raises(PublicationFailed, match=r"aborted|ended"):
            await sending

    run(scenario())
    for sample in run(case.samples(2, PROMPT)):
        assert case.agrees(sample.logprobs, logprobs(case.model, PROMPT, sample.tokens))


@pytest.mark.parametrize("mode", [weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE])
def test_generation_stands_still_only_for_an_inplace_transfer(case: Case, run: Run, mode: int) -> None:
    inplace = mode == weights_pb2.COMMIT_MODE_INPLACE

    async def published() -> list[Completion]:
        before = case.version
        sender = await case.shard_sender(mode, hold_after=2)
        await case.engine.prepare_receive(sender.request)
        sampling = asyncio.create_task(case.samples(4, PROMPT, max_response_tokens=100, temperature=1.5))
        while case.engine.load().running == 0:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)
        await case.engine.begin_receive()
        sender.start()
        assert case.engine.half_written == inplace
        done, _ = await asyncio.wait([sampling], timeout=0.3 if inplace else 20.0)
        assert bool(done) != inplace
        await case.receive_rest(sender)
        await case.engine.commit(sender.request.version, "recompute")
        samples = await sampling
        seen = {span.version for sample in samples for span in sample.versions}
        assert (sender.request.version in seen) if inplace else seen == {before}
        return samples

    for sample in run(published()):
        assert len(sample.logprobs) == len(sample.tokens)


def test_half_a_model_is_never_served_and_a_whole_one_repairs_it(case: Case, run: Run) -> None:
    async def scenario() -> list[Any]:
        tensors = case.tensors(case.random_model(99))
        del tensors[next(name for name in tensors if "layers.1.self_attn.k_proj" in name)]
        sender = Sender(tensors, version=case.version + 1, content=case.content)
        flying = asyncio.gather(
            *(case.engine.generate(PROMPT, Sampling(max_response_tokens=200)) for _ in range(4)),
            return_exceptions=True,
        )
        # The engine finds a parameter that nothing is written to: no publication of this job can be whole.
        with pytest.raises((PublicationFailed, InvalidJob), match=r"k_proj|qkv_proj"):
            await case.receive(sender)
            await case.engine.commit(sender.request.version, "recompute")
        # These see the difference in PREPARE and go on serving.
        refused_early = case.engine.name == "transformers" or case.base is not None
        ended = await flying
        if not refused_early:
            assert any(isinstance(e, InvalidState) for e in ended)
        return ended

    run(scenario())
    run(case.publish())
    for sample in run(case.samples(4, PROMPT)):
        assert case.agrees(sample.logprobs, logprobs(case.model, PROMPT, sample.tokens))


def test_manifest_of_another_dtype_is_refused(case: Case, run: Run) -> None:
    tensors = {name: t.half() for name, t in case.tensors(case.random_model(1)).items()}
    with pytest.raises(PublicationFailed, match=r"dtype|float16"):
        run(case.engine.prepare_receive(Sender(tensors, version=case.version + 1, content=case.content).request))


def test_aborted_transfer_is_forgotten(case: Case, run: Run) -> None:
    async def scenario() -> None:
        sender = case.sender(case.random_model(7), case.version + 1, hold_after=3)
        await case.engine.prepare_receive(sender.request)
        sender.start()
        await case.engine.begin_receive()
        waiting = asyncio.create_task(case.engine.received())
        await asyncio.sleep(0.2)
        await case.engine.abort_receive()
        with pytest.raises(PublicationFailed):
            await waiting
        sender.release()
        (sample,) = await case.samples(1, PROMPT)
        assert case.agrees(sample.logprobs, logprobs(case.model, PROMPT, sample.tokens))
        await case.publish()
        (sample,) = await case.samples(1, PROMPT)
        assert sample.versions[0].version == case.version

    run(scenario())


def test_nothing_is_sampled_where_no_version_is_in_place(case: Case, run: Run) -> None:
    async def scenario() -> None:
        sender = await case.shard_sender(weights_pb2.COMMIT_MODE_INPLACE, hold_after=2)
        await case.engine.prepare_receive(sender.request)
        flying = [asyncio.create_task(case.engine.generate(PROMPT, Sampling(200, temperature=2.0))) for _ in range(4)]
        sender.start()
        await case.engine.begin_receive()
        flying += [asyncio.create_task(case.engine.generate(PROMPT, Sampling(2))) for _ in range(4)]
        await asyncio.sleep(0.2)
        await case.engine.abort_receive()
        flying += [asyncio.create_task(case.engine.generate(PROMPT, Sampling(2))) for _ in range(4)]
        ended = await asyncio.wait_for(asyncio.gather(*flying, return_exceptions=True), 30)
        assert all(isinstance(end, InvalidState) for end in ended[4:])
        with pytest.raises(InvalidState, match="no version is in place"):
            await case.engine.generate(PROMPT, Sampling(1))
        sender.release()
        with pytest.raises(PublicationFailed):
            await asyncio.to_thread(sender.join)
        await case.publish()

    run(scenario())
    for sample in run(case.samples(4, PROMPT)):
        assert [(v.version, v.start, v.end) for v in sample.versions] == [(case.version, 0, len(sample.tokens))]
        assert case.agrees(sample.logprobs, logprobs(case.model, PROMPT, sample.tokens))


def test_a_dead_engine_says_so_to_everyone(case: Case, run: Run) -> None:
    """Last in this file: the engine does not come back."""

    async def scenario() -> None:
        flying = [
            asyncio.create_task(case.engine.generate(PROMPT, Sampling(max_response_tokens=200))) for _ in range(4)
        ]
        await asyncio.sleep(0.01)
        kill(case.engine)
        ended = await asyncio.wait_for(asyncio.gather(*flying, return_exceptions=True), 30)
        assert any(isinstance(end, EngineDied) for end in ended)
        assert all(isinstance(end, EngineDied | Completion) for end in ended)
        with pytest.raises(EngineDied):
            case.engine.load()
        with pytest.raises(EngineDied):
            await case.engine.generate(PROMPT, Sampling(max_response_tokens=1))

    run(scenario())


def kill(engine: Any) -> None:
    """The engine's end as the kernel or a defect would bring it."""
    if engine.name == "transformers":
        engine._model.forward = None
        return
    if engine.name == "sglang":
        os.kill(engine._engine.get_all_child_pids()[0], signal.SIGKILL)
        return
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    core = psutil.Process(process.pid)
    parent = core.parent()
    assert parent is not None
    # Both may be forked from one server, which has other engines' too; a worker has pipes in common with its core.
    own, near = pipes(core) - pipes(parent), [*core.children(), *parent.children()]
    workers = [p for p in near if "VLLM::Worker" in " ".join(p.cmdline()) and pipes(p) & own]
    assert len(workers) <= 1
    (*workers, core)[0].kill()  # a single one is in the core's process on GPUs


def pipes(process: psutil.Process) -> set[str]:
    """The pipes of a process but its standard files."""
    folder = Path(f"/proc/{process.pid}/fd")
    files = (os.readlink(file) for file in folder.iterdir() if int(file.name) > 2)
    return {file for file in files if file.startswith("pipe:")}
