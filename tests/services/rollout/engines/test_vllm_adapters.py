"""vLLM with an adapter that is published apart from the weights, in float32 on the CPU."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.plans.manifest import Content
from millrace.weights.transfer.checksum import checksum
from services.rollout.engine import Completion, Sampling
from services.rollout.engines import create
from tests.adapters import merged, published, with_adapter
from tests.models import random_model
from tests.sender import Sender, export
from tests.services.rollout.conftest import Run
from tests.services.rollout.engines.test_engines import LONG_PROMPT, PROMPT, Case, WholeReceiver
from tests.services.rollout.jobs import ENGINE_OPTIONS, adapter_job
from tests.services.rollout.reference import logprobs
from tests.shard_sender import Shards, ShardSender

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU vLLM computes no adapter in float32"),
]
RANK, ALPHA = 5, 16.0
"""vLLM has no kernels for this rank: the slot has 8."""
CLOSE = 1e-4
SHADOW, INPLACE = weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE


@dataclass
class Served:
    """An engine with the base of its job in place, and what was published to it."""

    engine: Any
    base: Any
    targets: str | list[str]
    version: int = 0
    case: Case = field(init=False)

    def __post_init__(self) -> None:
        self.case = Case(self.engine, tied=self.base.config.tie_word_embeddings, dtype=torch.float32)

    def adapted(self, seed: int) -> Any:
        """The base with an adapter that nobody else has."""
        return with_adapter(self.base, seed=seed, rank=RANK, alpha=ALPHA, targets=self.targets)

    async def publish(self, tensors: Mapping[str, torch.Tensor], content: Content, mode: int | None = SHADOW) -> None:
        """Publishes `tensors` as the next version, from two ranks; with no `mode` by broadcasts."""
        self.version += 1
        sender: Sender | ShardSender
        if mode is None:
            sender = Sender(tensors, version=self.version, content=content, receivers=self.engine.world_size)
        else:
            shards = Shards(tensors, content=content)
            wanted = await self.engine.describe(shards.manifest)
            sender = ShardSender(shards, wanted, version=self.version, mode=mode)  # type: ignore[arg-type]
        await self.case.receive(sender)
        swap = await self.engine.commit(sender.request.version, "recompute")
        assert mode is None or (swap.mode, swap.placed.loader_tensors) == (mode, 0)

    async def publish_adapter(self, adapted: Any, mode: int | None = SHADOW) -> None:
        await self.publish(published(adapted), Content.ADAPTER, mode)

    async def greedy(self) -> Completion:
        (sample,) = await self.case.samples(1, PROMPT, temperature=0.0, max_response_tokens=24)
        return sample

    async def checksums(self) -> dict[str, int]:
        """The checksum of each tensor, by worker and name."""
        return {
            f"{worker} {name}": value
            for worker, held in enumerate(await self.engine.checksums())
            for name, value in held.items()
        }


@pytest.fixture(
    scope="module",
    params=[
        "tied-all",
        pytest.param("untied-some", marks=pytest.mark.matrix),
        pytest.param("untied-all-tp2", marks=pytest.mark.matrix),
    ],
)
def served(request: pytest.FixtureRequest, run: Run, tied_model: Path, untied_model: Path) -> Iterator[Served]:
    tied, targets = request.param.startswith("tied"), "all-linear" if "all" in request.param else ["q_proj", "v_proj"]
    options = ENGINE_OPTIONS["vllm"] | {"tensor_parallel_size": 2 if "tp2" in request.param else 1}
    folder = tied_model if tied else untied_model
    engine = create("vllm")
    run(engine.start(adapter_job(folder, "vllm", rank=RANK, targets=targets, rollout={"engine_options": options})))
    served = Served(engine, random_model(tied=tied, seed=11), targets)
    run(served.publish(export(served.base), Content.BASE, None))
    run(served.publish_adapter(served.adapted(0)))
    yield served
    run(engine.stop())


def test_the_adapter_computes_what_merged_weights_and_peft_compute(served: Served, run: Run) -> None:
    adapted = served.adapted(1)

    async def scenario() -> tuple[Completion, Completion, list[Completion]]:
        await served.publish_adapter(adapted)
        apart, drawn = await served.greedy(), await served.case.samples(6, PROMPT)
        whole = export(merged(adapted))
        await served.publish(whole, Content.MODEL)
        await served.publish({name: torch.zeros_like(t) for name, t in published(adapted).items()}, Content.ADAPTER)
        together = await served.greedy()
        await served.publish(export(served.base), Content.BASE)
        return apart, together, drawn

    apart, together, drawn = run(scenario())
    for sample in (apart, *drawn):
        assert np.abs(sample.logprobs - logprobs(adapted, PROMPT, sample.tokens)).max() < CLOSE
    assert list(apart.tokens) == list(together.tokens)
    assert np.abs(apart.logprobs - together.logprobs).max() < CLOSE
    # Without the adapter the distribution is another one: an adapter that is not used would show.
    assert np.abs(apart.logprobs - logprobs(served.base, PROMPT, apart.tokens)).max() > 0.1


@pytest.mark.parametrize("cache_policy", ["recompute", pytest.param("keep", marks=pytest.mark.matrix)])
def test_versions_are_true_where_the_adapter_changes_under_requests(
    served: Served, run: Run, cache_policy: str
) -> None:
    old, new = served.adapted(2), served.adapted(3)

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        await served.publish_adapter(old)
        served.version += 1
        shards = Shards(published(new), content=Content.ADAPTER)
        sender = ShardSender(shards, await served.engine.describe(shards.manifest), version=served.version)
        sampling = Sampling(max_response_tokens=120)
        flying = asyncio.gather(*(served.engine.generate(LONG_PROMPT, sampling) for _ in range(4)))
        while served.engine.load().running == 0:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)
        await served.case.receive(sender)
        await served.engine.commit(sender.request.version, cache_policy)
        return list(await flying), await served.case.samples(2, LONG_PROMPT)

    samples, after = run(scenario())
    crossing = [sample for sample in samples if len(sample.versions) == 2]
    assert crossing, "no sample was in flight across the change"
    for sample in crossing:
        before, now = sample.versions
        assert (before.version, now.version) == (served.version - 1, served.version)
        under = {model: logprobs(model, LONG_PROMPT, sample.tokens) for model in (old, new)}
        assert np.abs(sample.logprobs - under[old])[: before.end].max() < CLOSE
        assert np.abs(under[old] - under[new])[before.end :].max(initial=0.0) > 0.1
        if cache_policy == "recompute":
            assert np.abs(sample.logprobs - under[new])[before.end :].max() < CLOSE
    for sample in after:  # their prompt's keys and values are in the cache under the old version
        assert np.abs(sample.logprobs - logprobs(new, LONG_PROMPT, sample.tokens)).max() < CLOSE


def test_every_way_of_publishing_puts_the_same_bytes_in_place(served: Served, run: Run) -> None:
    first, second = served.adapted(4), served.adapted(5)

    async def scenario() -> None:
        sent = {f"0 {name}": checksum(tensor) for name, tensor in published(first).items()}
        held = []
        for mode in (SHADOW, INPLACE, None):
            await served.publish_adapter(second)
            await served.publish_adapter(first, mode)
            held.append(await served.checksums())
        assert held[0] == held[1] == held[2]
        if served.engine.world_size == 1:
            assert {name: value for name, value in held[0].items() if name in sent} == sent
        await served.publish_adapter(second)
        other = await served.checksums()
        changed = {name.split()[1] for name in other if other[name] != held[0][name]}
        assert changed == set(published(first))

    run(scenario())


def test_the_adapter_is_sent_on_to_a_sibling(served: Served, run: Run) -> None:
    if served.engine.world_size > 1:
        pytest.skip("this sibling receives from one worker")
    adapted = served.adapted(6)

    async def scenario() -> None:
        await served.publish_adapter(adapted)
        manifest = Shards(published(adapted), content=Content.ADAPTER).manifest
        sibling = WholeReceiver(manifest, await served.engine.describe(manifest))
        await served.engine.prepare_send(sibling.request, f"job-test/{served.version}/1/0")
        sending = asyncio.create_task(served.engine.send(sibling.request))
        await asyncio.to_thread(sibling.receive)
        await sending
        await served.engine.end_send()
        for name, tensor in published(adapted).items():
            assert torch.equal(sibling.tensors[name], tensor), name

    run(scenario())


def _less(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(tensors.items())[:-1])


def _more(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(iter(tensors))
    return {**tensors, name.replace("layers.0", "layers.7"): tensors[name]}


def _of_another_rank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t[:4].contiguous() if "lora_A" in name else t[:, :4].contiguous() for name, t in tensors.items()}


@pytest.mark.parametrize("change", [_less, _more, _of_another_rank])
def test_an_adapter_that_is_not_the_jobs_is_refused(served: Served, run: Run, change: Any) -> None:
    adapted = served.adapted(7)

    async def scenario() -> Completion:
        await served.publish_adapter(adapted)
        wrong = change(published(served.adapted(8)))
        with pytest.raises(PublicationFailed, match="tensors of the adapter differ"):
            await served.engine.describe(Shards(wrong, content=Content.ADAPTER).manifest)
        with pytest.raises(PublicationFailed, match="tensors of the adapter differ"):
            await served.engine.prepare_receive(Sender(wrong, version=99, content=Content.ADAPTER).request)
        return await served.greedy()

    sample = run(scenario())
    assert np.abs(sample.logprobs - logprobs(adapted, PROMPT, sample.tokens)).max() < CLOSE
