"""The adapter alone over gRPC: after its base, verified and versioned as whole weights are, and copied to a sibling."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import rollout_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.spec import JobSpec
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Content
from tests.adapters import merged, published, with_adapter
from tests.models import random_model
from tests.sender import export
from tests.services.rollout.coordinator import JOB, configure, publish, until
from tests.services.rollout.jobs import adapter_job
from tests.services.rollout.reference import logprobs
from tests.services.rollout.stack import Stack, replica_stack
from tests.services.rollout.weights.test_receive_shards import INPLACE, SHADOW, Coming, serves
from tests.services.rollout.weights.test_sibling_copies import Copy, Gate, gate  # noqa: F401 - a fixture
from tests.shard_sender import Shards, ShardSender

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def spec(folder: Path) -> JobSpec:
    return adapter_job(folder, "transformers", rank=4, targets=TARGETS)


def adapted(version: int) -> Any:
    """The model of every version with that version's adapter, by PEFT."""
    return with_adapter(random_model(tied=True, seed=1), seed=version, rank=4, alpha=8, targets=TARGETS)


async def coming(
    stack: Stack, tensors: Mapping[str, torch.Tensor], content: Content, version: int, **options: Any
) -> Coming:
    shards = Shards(tensors, content=content)
    request = rollout_pb2.DescribeReceiveRequest(job_id=JOB, manifest=shards.manifest.to_proto())
    told = await stack.peer.call(RolloutRpc.DescribeWeights, request)
    return Coming(stack, ShardSender(shards, wire_layouts.decode(told.layouts), version=version, job=JOB, **options))


async def base(stack: Stack, **options: Any) -> Coming:
    return await coming(stack, export(random_model(tied=True, seed=1)), Content.BASE, **{"version": 1} | options)


async def adapter(stack: Stack, version: int, attempt: int = 1, **options: Any) -> Coming:
    return await coming(stack, published(adapted(version)), Content.ADAPTER, version, attempt=attempt, **options)


def play(folder: Path, scenario: Any) -> None:
    """Runs `scenario` on a replica that is configured and has no weights."""

    async def whole() -> None:
        async with replica_stack() as stack:
            await configure(stack.peer, spec(folder))
            await scenario(stack)

    asyncio.run(whole())


async def answers_as(stack: Stack, version: int) -> None:
    """New answers have this version, and the log-probabilities that PEFT and the merged model give."""
    prompt_id = stack.coordinator.issue(100 * version + stack.coordinator.answered)
    await until(lambda: prompt_id in stack.coordinator.groups)
    group = stack.coordinator.groups[prompt_id]
    prompt = torch.frombuffer(bytearray(group.prompt_tokens), dtype=torch.int32).tolist()
    by_peft = adapted(version)
    for trajectory in group.trajectories:
        assert {span.version for span in trajectory.versions} == {version}
        tokens = torch.frombuffer(bytearray(trajectory.tokens), dtype=torch.int32).tolist()
        found = torch.frombuffer(bytearray(trajectory.logprobs), dtype=torch.float32)
        for model in (by_peft, merged(by_peft)):
            assert torch.allclose(found, torch.tensor(logprobs(model, prompt, tokens)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_an_adapter_on_its_base_answers_as_peft_and_the_merged_model(tied_model: Path, mode: int) -> None:
    async def scenario(stack: Stack) -> None:
        await (await base(stack, mode=mode)).whole()
        await serves(stack, None)
        again = await configure(stack.peer, spec(tied_model))
        assert again.has_base, "only the adapter has to be published to it"
        for version in (1, 2):
            report = await (await adapter(stack, version, mode=mode)).whole()
            assert report.mode == mode and report.bytes < 60_000
            await serves(stack, version)
            await answers_as(stack, version)

    play(tied_model, scenario)


def test_gather_and_broadcast_bring_both_as_well(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        tensors, member = export(random_model(tied=True, seed=1)), stack.replica.member_id
        await publish(stack.peer, member, tensors, 1, content=Content.BASE)
        await serves(stack, None)
        for version in (1, 2):
            await publish(stack.peer, member, published(adapted(version)), version, attempt=1, content=Content.ADAPTER)
            await answers_as(stack, version)

    play(tied_model, scenario)


def test_an_adapter_without_its_base_is_refused(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        assert not (await configure(stack.peer, spec(tied_model))).has_base
        with pytest.raises(PublicationFailed, match="does not hold the base") as failed:
            await (await adapter(stack, 1)).prepare()
        assert failed.value.culprits == (stack.replica.member_id,)

    play(tied_model, scenario)


@pytest.mark.parametrize("mode", [SHADOW, INPLACE])
def test_a_byte_that_changed_on_the_wire_is_never_served(tied_model: Path, mode: int) -> None:
    """In place, the replica then serves nothing; its base stays, and the next adapter is enough."""

    async def scenario(stack: Stack) -> None:
        await (await base(stack)).whole()
        await (await adapter(stack, 1)).whole()
        new = await adapter(stack, 2, mode=mode, corrupt=True)
        await new.begin()
        with pytest.raises(PublicationFailed, match=r"changed, with parts of base_model\.model\."):
            await new.verify()
        await serves(stack, 1 if mode == SHADOW else None)
        assert (await configure(stack.peer, spec(tied_model))).has_base
        await (await adapter(stack, 2, attempt=2, mode=mode)).whole()
        await answers_as(stack, 2)

    play(tied_model, scenario)


def test_versions_of_tokens_are_true_across_a_swap_of_adapters(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        await (await base(stack)).whole()
        await (await adapter(stack, 1)).whole()
        new = await adapter(stack, 2)
        await new.begin()
        await new.verify()
        prompt_id = stack.coordinator.issue(1, max_response_tokens=200)
        await until(lambda: stack.replica.load().running > 0)
        await new.commit()
        await until(lambda: prompt_id in stack.coordinator.groups)
        group, models = stack.coordinator.groups[prompt_id], {version: adapted(version) for version in (1, 2)}
        prompt = torch.frombuffer(bytearray(group.prompt_tokens), dtype=torch.int32).tolist()
        spans = [span for trajectory in group.trajectories for span in trajectory.versions]
        assert {span.version for span in spans} == {1, 2}
        for trajectory in group.trajectories:
            tokens = torch.frombuffer(bytearray(trajectory.tokens), dtype=torch.int32).tolist()
            found = torch.frombuffer(bytearray(trajectory.logprobs), dtype=torch.float32)
            for span in trajectory.versions:
                expected = torch.tensor(logprobs(models[span.version], prompt, tokens))
                part = slice(span.start, span.end)
                assert torch.allclose(found[part], expected[part], atol=1e-4, rtol=0)

    play(tied_model, scenario)


def test_a_sibling_gets_base_and_adapter_one_after_the_other(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as sibling, replica_stack() as late:
            for stack in (sibling, late):
                await configure(stack.peer, spec(tied_model))
            await (await base(sibling)).whole()
            with pytest.raises(InvalidState, match="serves no version that can be copied"):
                await Copy(sibling, late, content=Content.BASE).prepare()
            await (await adapter(sibling, 1)).whole()
            await (await adapter(sibling, 2)).whole()
            await Copy(sibling, late, version=2, content=Content.BASE).whole()
            await serves(late, None)
            await Copy(sibling, late, version=2, attempt=6, content=Content.ADAPTER).whole()
            await serves(late, 2)
            await answers_as(late, 2)
            await (await adapter(sibling, 3, attempt=7)).whole()
            await answers_as(sibling, 3)

    asyncio.run(scenario())


def test_a_copy_of_the_base_goes_on_while_the_sibling_gets_the_next_adapter(
    tied_model: Path,
    gate: Gate,  # noqa: F811
) -> None:
    async def scenario() -> None:
        async with replica_stack() as sibling, replica_stack() as late:
            for stack in (sibling, late):
                await configure(stack.peer, spec(tied_model))
            await (await base(sibling)).whole()
            await (await adapter(sibling, 1)).whole()
            copy = Copy(sibling, late, version=1, content=Content.BASE)
            sending = await copy.begin()
            await gate.held()
            await (await adapter(sibling, 2, attempt=6)).whole()
            await answers_as(sibling, 2)
            assert not sending.done()
            gate.open.set()
            await copy.verify(await sending)
            await copy.commit()
            await copy.finish()
            await Copy(sibling, late, version=2, attempt=7, content=Content.ADAPTER).whole()
            await answers_as(late, 2)

    asyncio.run(scenario())
