"""Data-parallel attention with the experts over all ranks, in vLLM's CPU build: every scheduler pauses, its workers get
their parts of a version, all go on with it, and every token has the version that sampled it."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from millrace.contracts.v1 import weights_pb2
from millrace.ids import Version
from services.rollout.engine import Completion, EngineDied, Sampling, VersionSpan
from services.rollout.engines import create
from tests.models import byte_tokenizer
from tests.sender import Sender
from tests.services.rollout.conftest import Run
from tests.services.rollout.engines.marked import marked_and_reported
from tests.services.rollout.engines.test_engines import LONG_PROMPT, Case
from tests.services.rollout.jobs import ENGINE_OPTIONS, job_spec
from tests.services.rollout.reference import logprobs
from tests.services.trainer.backends.megatron import tiny
from tests.shard_sender import Shards, ShardSender

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(400)]
RANKS = 2
CLOSE = 1e-3
SHADOW, INPLACE = weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE
PROMPTS = [[257, *(b"%03d" % number * 50)] for number in range(4)]
"""Longer than one block of the prefix cache of vLLM's CPU build."""
ANSWER = Sampling(max_response_tokens=100)


class Served:
    """An engine of two data-parallel ranks, and two models of one config."""

    def __init__(self, engine: Any, folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> None:
        self.engine = engine
        self.case = Case(engine, tied=False, dtype=dtype)
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name: t if "e_score" in name else t.to(dtype) for name, t in stored.items()}
        self.models = {False: model, True: _changed(model)}
        self.version = 0
        self.ranks: list[int] = []
        """The rank of each request, in the order in which they came."""
        generate = engine._llm.generate

        def noted(*arguments: Any, **named: Any) -> Any:
            self.ranks.append(named["data_parallel_rank"])
            return generate(*arguments, **named)

        engine._llm.generate = noted

    def published(self, changed: bool) -> dict[str, torch.Tensor]:
        return {name: _other(name, t) if changed else t for name, t in self.tensors.items()}

    async def publish(self, changed: bool, mode: int | None = SHADOW, *, policy: str = "recompute") -> None:
        """The next version. None for `mode`: every tensor whole."""
        self.version += 1
        tensors, sender = self.published(changed), None
        if mode is None:
            sender = Sender(tensors, version=self.version, receivers=self.engine.world_size)
        else:
            shards = Shards(tensors)
            wanted = await self.engine.describe(shards.manifest)
            sender = ShardSender(shards, wanted, version=self.version, mode=mode)  # type: ignore[arg-type]
        await self.case.receive(sender)
        await self.engine.commit(Version(self.version), policy)

    async def answers(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return list(await asyncio.gather(*(self.engine.generate(prompt, ANSWER) for prompt in prompts)))

    def check(self, prompt: list[int], answer: Completion, versions: dict[int, bool]) -> None:
        """Every token has the log-probability of the version that it is labelled with. `versions`: whether the model of
        a version is the changed one."""
        for span in answer.versions:
            expected = logprobs(self.models[versions[span.version]], prompt, answer.tokens)
            assert np.abs(expected - answer.logprobs)[span.start : span.end].max(initial=0.0) < CLOSE


def _other(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if "norm" in name else tensor * 1.3


def _changed(model: Any) -> Any:
    other = type(model)(model.config).float().eval()
    other.load_state_dict({name: _other(name, tensor) for name, tensor in model.state_dict().items()})
    return other


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_moe-tp2"])
def served(request: pytest.FixtureRequest, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, _, tensor_parallel = request.param.partition("-tp")
    folder = tmp_path_factory.mktemp(kind)
    model = tiny.save(kind, folder, served=True)
    byte_tokenizer().save_pretrained(folder)
    options = {
        **ENGINE_OPTIONS["vllm"],
        "data_parallel_size": RANKS,
        "tensor_parallel_size": int(tensor_parallel or 1),
    }
    engine = create("vllm")
    run(engine.start(job_spec(folder, "vllm", rollout={"engine_options": options})))
    served = Served(engine, folder, model)
    run(served.publish(False))
    yield served
    run(engine.stop())


def test_experts_lie_over_all_workers_and_the_rest_whole_in_each_rank(served: Served, run: Run) -> None:
    engine, workers = served.engine, served.engine.world_size
    assert (workers % RANKS, engine.capacity) == (0, RANKS * 16)
    manifest = Shards(served.tensors).manifest
    wanted = run(engine.describe(manifest))
    assert len(wanted) == workers
    elements = np.zeros((workers, len(manifest.tensors)), dtype=np.int64)
    for worker, boxes in enumerate(wanted):
        np.add.at(elements[worker], boxes.tensor, boxes.numel)
    for index, info in enumerate(manifest.tensors):
        whole = int(np.prod(info.shape))
        if ".experts." in info.name:
            assert sorted(elements[:, index]) == [0] * (workers - 1) + [whole], info.name
        else:
            of_ranks = elements[:, index].reshape(RANKS, -1)
            assert (of_ranks == of_ranks[0]).all() and of_ranks[0].sum() >= whole, info.name
    of_worker = elements[:, [".experts." in info.name for info in manifest.tensors]].sum(axis=1)
    assert (of_worker == of_worker[0]).all()


def test_every_way_of_publishing_puts_the_same_bytes_in_place(served: Served, run: Run) -> None:
    async def scenario() -> None:
        held = []
        for mode in (None, SHADOW, INPLACE):
            await served.publish(True, SHADOW)
            other = await served.engine.checksums()
            await served.publish(False, mode)
            held.append(await served.engine.checksums())
            assert all(one != two for one, two in zip(other, held[-1], strict=True))
        assert held[0] == held[1] == held[2]

    run(scenario())


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["both ranks", "one rank, the other runs along"])
def test_tokens_have_the_version_that_sampled_them(
    served: Served, run: Run, mode: int, prompts: list[list[int]]
) -> None:
    async def scenario() -> None:
        await served.publish(False)
        old, served.ranks = served.version, []
        flying = [asyncio.create_task(served.engine.generate(prompt, ANSWER)) for prompt in prompts]
        await _until(lambda: len(served.ranks) == len(prompts))
        await served.publish(True, mode)
        answers, ranks = await asyncio.gather(*flying), served.ranks[:]
        versions = {old: False, served.version: True}
        crossing = [rank for rank, a in zip(ranks, answers, strict=True) if len(a.versions) == 2]
        assert set(crossing) == set(ranks), "no answer was in flight on a rank"
        assert len(set(ranks)) == min(RANKS, len(prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert {span.version for span in answer.versions} <= versions.keys()
            served.check(prompt, answer, versions)
        for prompt, answer in zip(PROMPTS, await served.answers(PROMPTS), strict=True):
            assert answer.versions == (VersionSpan(Version(served.version), 0, len(answer.tokens)),)
            served.check(prompt, answer, versions)

    run(scenario())


def test_versions_are_marked_as_vllm_reports_them(served: Served, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way for releases of vLLM that report none, beside one that does."""
    engine = served.engine
    marked, reported = marked_and_reported(engine, monkeypatch)

    async def scenario() -> None:
        await served.publish(False)
        flying = asyncio.gather(*(engine.generate(prompt, ANSWER) for prompt in PROMPTS))
        began = time.perf_counter()
        await _until(lambda: engine._stats.last_step_s > began)
        await served.publish(True)
        await flying

    run(scenario())
    assert marked == reported and any(len(versions) == 2 for versions in marked)


def test_samples_of_a_prompt_find_its_keys_and_values_until_the_next_version(served: Served, run: Run) -> None:
    if not served.engine._cache_block:
        pytest.skip("vLLM's CPU build keeps no prefixes for attention on latents")

    async def found(prompt: list[int]) -> int:
        answer = await served.engine.generate(prompt, Sampling(max_response_tokens=4))
        assert answer.cached is not None
        return answer.cached.tokens

    async def scenario() -> None:
        await served.publish(False)
        served.ranks = []
        for prompt in PROMPTS:
            assert await found(prompt) == 0
            assert await found(prompt) > 0 and await found(prompt) > 0
        assert [served.ranks[start : start + 3] for start in range(0, 12, 3)] == [[0] * 3, [1] * 3] * 2
        await served.publish(False)
        assert await found(PROMPTS[0]) == 0

    run(scenario())


def test_samples_of_both_ranks_are_drawn_apart(served: Served, run: Run) -> None:
    served.ranks = []
    answers = run(served.answers([LONG_PROMPT[:20]] * 8))
    assert sorted(served.ranks) == [0] * 4 + [1] * 4
    drawn = [tuple(answer.tokens[:8]) for answer in answers if len(answer.tokens) >= 8]
    assert len(set(drawn)) == len(drawn)


def test_requests_of_both_ranks_are_counted_together(served: Served, run: Run) -> None:
    engine = served.engine

    async def scenario() -> None:
        flying = asyncio.gather(*(engine.generate(prompt, ANSWER) for prompt in PROMPTS * 2))
        # Each rank has half of the eight.
        await _until(lambda: engine.stats() is not None and engine.stats().running == engine.load().running > 4)
        stats = engine.stats()
        assert stats.waiting == 0 and 0.0 < stats.cache_used < 1.0
        await flying
        assert (engine.stats().running, engine.stats().cache_used) == (0, 0.0)

    run(scenario())


def test_a_pause_that_is_given_up_on_its_way_leaves_no_rank_behind(served: Served, run: Run) -> None:
    """It has reached one rank alone, which cannot come to it without the other."""
    engine, client = served.engine, served.engine._llm.engine_core

    async def scenario() -> None:
        await served.publish(False)
        flying = asyncio.gather(*(engine.generate(prompt, ANSWER) for prompt in PROMPTS))
        began = time.perf_counter()
        await _until(lambda: engine._stats.last_step_s > began)
        first = client._call_utility_async("pause_scheduler", "keep", False, engine=client.core_engines[0])
        pausing = asyncio.create_task(first)
        await _until(lambda: bool(client.utility_results))
        engine._paused, engine._stands = True, False
        await engine._leave_pause()
        await engine._leave_pause()
        await pausing
        for prompt, answer in zip(PROMPTS, await flying, strict=True):
            served.check(prompt, answer, {served.version: False})

    run(scenario())


def test_the_end_of_one_scheduler_is_the_end_of_the_engine(served: Served, run: Run) -> None:
    """The last test of an engine."""

    async def scenario() -> None:
        victim = served.engine._llm.engine_core.resources.engine_manager.processes[1]
        flying = asyncio.create_task(served.engine.generate(PROMPTS[0], ANSWER))
        await asyncio.sleep(0)
        psutil.Process(victim.pid).kill()
        with pytest.raises(EngineDied):
            await flying
            await _until(lambda: served.engine.load() is None)

    run(scenario())


async def _until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    give_up = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)
