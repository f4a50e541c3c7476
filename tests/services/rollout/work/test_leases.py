"""The pull loop against a scripted coordinator: what is leased, answered, dropped, stopped, given back."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from millrace.contracts.methods import RolloutRpc
from millrace.contracts.v1 import common_pb2, rollout_pb2, work_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import InvalidJob, InvalidState
from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from services.rollout.member.process import drain
from services.rollout.work import leases
from tests.models import byte_tokenizer, random_model
from tests.services.rollout.coordinator import configure, status, until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.reference import logprobs
from tests.services.rollout.stack import replica_stack, restart

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "raise":
        raise ValueError("no such answer")
    return {"score": float(len(solution_str)), "kind": data_source}
"""


def test_a_lease_becomes_a_group_with_everything_in_it(tied_model: Path) -> None:
    async def scenario() -> common_pb2.Group:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model), version=3)
            prompt_id = stack.coordinator.issue(7, ground_truth={"answer": 1}, samples=5, max_response_tokens=12)
            await until(lambda: stack.coordinator.answered == 1)
            return stack.coordinator.groups[prompt_id]

    group = asyncio.run(scenario())
    assert (group.job_id, group.prompt_id, group.purpose) == ("job-test", "0-7", common_pb2.PURPOSE_TRAIN)
    assert (group.data_source, group.engine, json.loads(group.ground_truth)) == ("test", "transformers", {"answer": 1})
    assert group.prompt_text == "<|im_start|>user\nquestion 7<|im_end|>\n<|im_start|>assistant\n"
    assert group.question == "question 7"
    prompt = unpack_tokens(group.prompt_tokens)
    assert byte_tokenizer().decode(prompt.tolist()) == group.prompt_text
    assert group.generate_s > 0
    assert len(group.trajectories) == 5
    model = random_model(tied=True, seed=3)
    for trajectory in group.trajectories:
        tokens = unpack_tokens(trajectory.tokens)
        assert 1 <= len(tokens) <= 12
        assert [(v.version, v.start, v.end) for v in trajectory.versions] == [(3, 0, len(tokens))]
        expected = logprobs(model, prompt.tolist(), tokens.tolist())
        assert np.abs(unpack_logprobs(trajectory.logprobs) - expected).max() < 1e-3
        assert trajectory.HasField("reward")
        assert trajectory.stop_reason in (common_pb2.STOP_REASON_LENGTH, common_pb2.STOP_REASON_END_OF_TURN)


def test_a_greedy_answer_is_scored_beside_the_group(tied_model: Path) -> None:
    """It is no trajectory; its reward is the group's, and the same for the same prompt."""

    async def scenario() -> list[common_pb2.Group]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model, reward={"function": "regex", "options": {"pattern": "(.*)"}}))
            for row in (0, 1):
                stack.coordinator.issue(row, samples=2, max_response_tokens=8, greedy_baseline=bool(row == 0))
            await until(lambda: stack.coordinator.answered == 2)
            assert stack.replica.leases.generated_tokens > sum(
                len(unpack_tokens(t.tokens)) for g in stack.coordinator.groups.values() for t in g.trajectories
            )
            return [stack.coordinator.groups[f"0-{row}"] for row in (0, 1)]

    with_greedy, without = asyncio.run(scenario())
    assert len(with_greedy.trajectories) == len(without.trajectories) == 2
    assert with_greedy.HasField("greedy_reward") and not without.HasField("greedy_reward")


@pytest.mark.parametrize(
    ("returned", "told"),
    [("{'score': 1.0}", "no 'format'"), ("{'score': 1.0, 'format': 'x'}", "format 'x', not a number")],
)
def test_a_reward_without_its_parts_costs_the_group(returned: str, told: str, tied_model: Path, tmp_path: Path) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {returned}\n"
    )

    async def scenario() -> str:
        async with replica_stack() as stack:
            reward = {"function": f"{function}:compute_score", "parts": ["score", "format"]}
            await stack.serve(job_spec(tied_model, reward=reward))
            prompt_id = stack.coordinator.issue(0, samples=2, max_response_tokens=4)
            await until(lambda: stack.coordinator.answered == 1)
            drop = stack.coordinator.dropped[prompt_id]
            assert drop.reason is DropReason.REWARD_FAILED
            return drop.detail

    assert told in asyncio.run(scenario())


def test_many_leases_fill_the_engine_and_all_come_back(tied_model: Path) -> None:
    async def scenario() -> tuple[int, int]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            wanted = {stack.coordinator.issue(i, max_response_tokens=40) for i in range(25)}
            busiest = 0
            async with asyncio.timeout(60):
                while stack.coordinator.answered < 25:
                    busiest = max(busiest, (await status(stack.peer)).running)
            assert set(stack.coordinator.groups) == wanted
            generated = sum(
                len(unpack_tokens(t.tokens)) for g in stack.coordinator.groups.values() for t in g.trajectories
            )
            return busiest, generated - stack.replica.leases.generated_tokens

    busiest, uncounted = asyncio.run(scenario())
    assert busiest == 16
    assert uncounted == 0


def test_nothing_is_leased_before_a_version_is_in_place(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            stack.coordinator.issue(0)
            await configure(stack.peer, job_spec(tied_model))
            await asyncio.sleep(0.3)
            assert len(stack.coordinator.waiting) == 1
            assert (await status(stack.peer)).state == rollout_pb2.ENGINE_STATE_WITHOUT_WEIGHTS
            assert stack.coordinator.beats[-1].version == -1
            await stack.publish(1)
            await until(lambda: stack.coordinator.answered == 1)
            await until(lambda: stack.coordinator.beats[-1].version == 1 and stack.coordinator.beats[-1].tokens > 0)
            await until(lambda: stack.coordinator.beats[-1].usage.hosts)
            usage = stack.coordinator.beats[-1].usage
            assert usage.hosts[0].process_bytes > 0 and usage.HasField("cache_used")

    asyncio.run(scenario())


def test_prompts_that_will_not_do_are_dropped_with_the_reason(tied_model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)

    async def scenario() -> tuple[dict[str, Drop], common_pb2.Group]:
        async with replica_stack() as stack:
            spec = job_spec(tied_model, reward={"function": f"{reward}:compute_score"})
            await stack.serve(spec)
            stack.coordinator.issue(1, [{"role": "user", "content": "x" * 300}])
            stack.coordinator.issue(2, 5)
            stack.coordinator.issue(3, ground_truth="raise")
            stack.coordinator.issue(4)
            await until(lambda: stack.coordinator.answered == 4)
            return stack.coordinator.dropped, stack.coordinator.groups["0-4"]

    dropped, group = asyncio.run(scenario())
    assert set(dropped) == {"0-1", "0-2", "0-3"}
    assert {prompt: drop.reason for prompt, drop in dropped.items()} == {
        "0-1": DropReason.PROMPT_TOO_LONG,
        "0-2": DropReason.BAD_PROMPT,
        "0-3": DropReason.REWARD_FAILED,
    }
    assert dropped["0-1"].detail.endswith("> 200 tokens")
    assert dropped["0-2"].detail.startswith("row 2 of test: the tokenizer refuses it")
    assert dropped["0-3"].detail.startswith("raised ValueError: no such answer")
    first = group.trajectories[0]
    assert first.reward == len(first.text)
    assert json.loads(first.reward_details) == {"kind": "test"}


def test_greedy_evaluation(tied_model: Path) -> None:
    async def scenario() -> common_pb2.Group:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            stack.coordinator.issue(0, samples=2, temperature=0.0)
            await until(lambda: stack.coordinator.answered == 1)
            return stack.coordinator.groups["0-0"]

    group = asyncio.run(scenario())
    assert group.trajectories[0].tokens == group.trajectories[1].tokens


def test_leases_are_extended_while_they_are_worked_on_and_lost_ones_stopped(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack(lease_s=0.3) as stack:
            rollout = {"samples_per_prompt": 16, "engine_options": {"max_num_seqs": 16}, "max_response_tokens": 4000}
            await stack.serve(job_spec(tied_model, rollout=rollout, trainer={"token_budget": 8192}))
            stack.coordinator.issue(0, samples=16, max_response_tokens=4000)
            await until(lambda: stack.coordinator.extends >= 1)
            assert (await status(stack.peer)).running > 0
            stack.coordinator.lost.add("lease-0")
            await until(lambda: stack.replica.load().running == 0)
            assert stack.coordinator.answered == 0

    asyncio.run(scenario())


def test_a_coordinator_that_restarts_costs_nothing(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            for i in range(12):
                stack.coordinator.issue(i, max_response_tokens=100)
            await until(lambda: stack.coordinator.answered >= 1)
            stack.coordinator.withholds = True  # a lease that is lost on its way would come again when it ends
            await until(lambda: stack.coordinator.withheld > 0)
            await restart(stack)
            stack.coordinator.withholds = False
            await until(lambda: stack.coordinator.answered == 12)
            assert stack.coordinator.released == []
            assert len(stack.coordinator.groups) == 12
            assert stack.coordinator.registrations == [stack.replica.member_id]

    asyncio.run(scenario())


def test_a_forgotten_member_registers_anew_under_its_id_and_keeps_its_work(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            for i in range(6):
                stack.coordinator.issue(i, max_response_tokens=100)
            await until(lambda: len(stack.coordinator.leased) >= 1)
            stack.coordinator.members.clear()
            await until(lambda: stack.coordinator.answered == 6)
            assert stack.coordinator.registrations == [stack.replica.member_id] * 2

    asyncio.run(scenario())


def test_leases_of_another_job_are_given_back(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            stack.coordinator.issue(0)
            stack.coordinator.waiting[0].ref.job_id = "job-other"
            await until(lambda: stack.coordinator.released == ["lease-0"])
            assert stack.coordinator.answered == 0

    with capture_logs() as logged:
        asyncio.run(scenario())
    assert [each["log_level"] for each in logged if each["event"] == "lease returned"] == ["info"]


def test_configuring_another_job_gives_leases_back_and_keeps_the_engine(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            spec = job_spec(tied_model, rollout={"max_response_tokens": 4000}, trainer={"token_budget": 8192})
            await stack.serve(spec)
            engine = stack.replica.engine
            stack.coordinator.issue(0, samples=16, max_response_tokens=4000)
            await until(lambda: stack.replica.load().running > 0)
            await configure(stack.peer, spec, "job-next")
            assert stack.replica.engine is engine
            assert stack.coordinator.released == ["lease-0"]
            after = await status(stack.peer)
            assert (after.job_id, after.version, after.running) == ("job-next", -1, 0)
            with pytest.raises(InvalidState, match="holds no verified version"):
                request = rollout_pb2.GenerateRequest(prompt='"hello"')
                await stack.peer.call(RolloutRpc.Generate, request)

    asyncio.run(scenario())


def test_same_job_configured_again_keeps_its_version(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            spec = job_spec(tied_model)
            await stack.serve(spec, version=4)
            again = await configure(stack.peer, spec)
            assert (again.world_size, again.dtype) == (1, "float32")
            assert (await status(stack.peer)).version == 4

    asyncio.run(scenario())


def test_generate_answers_outside_any_lease(tied_model: Path) -> None:
    async def scenario() -> rollout_pb2.GenerateResponse:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            sampling = work_pb2.Sampling(samples=3, max_response_tokens=5, temperature=1.0, top_p=1.0)
            request = rollout_pb2.GenerateRequest(prompt='"hello"', sampling=sampling)
            return await stack.peer.call(RolloutRpc.Generate, request)

    reply = asyncio.run(scenario())
    assert unpack_tokens(reply.prompt_tokens).tolist() == list(b"hello")
    assert len(reply.trajectories) == 3


def test_a_prompt_that_brings_out_a_defect_is_dropped_and_the_others_go_on(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> dict[str, str]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            prompt_of = stack.replica.job.prompt

            async def defective(lease: work_pb2.Lease) -> object:
                if lease.prompt_id == "0-1":
                    raise KeyError("nobody thought of this")
                return await prompt_of(lease)

            monkeypatch.setattr(stack.replica.job, "prompt", defective)
            for i in range(4):
                stack.coordinator.issue(i)
            await until(lambda: stack.coordinator.answered == 4)
            return stack.coordinator.dropped

    dropped = asyncio.run(scenario())
    assert dropped == {"0-1": Drop(DropReason.REPLICA_FAILED, "KeyError: 'nobody thought of this'")}


def test_a_group_that_no_message_can_hold_is_dropped(tied_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LARGEST_GROUP_BYTES", leases.ENVELOPE_BYTES + 5000)

    async def scenario() -> tuple[set[str], dict[str, Drop]]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            stack.coordinator.issue(0)
            stack.coordinator.issue(1, ground_truth="x" * 10_000)
            await until(lambda: stack.coordinator.answered == 2)
            return set(stack.coordinator.groups), stack.coordinator.dropped

    groups, dropped = asyncio.run(scenario())
    assert groups == {"0-0"} and dropped["0-1"].reason is DropReason.GROUP_TOO_LARGE
    assert "Fix: lower rollout.samples_per_prompt" in dropped["0-1"].detail


def test_an_engine_that_dies_ends_the_service_and_answers_nothing(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            stack.replica.engine._model.forward = None
            for i in range(8):
                stack.coordinator.issue(i)
            await asyncio.wait_for(stack.replica.died.wait(), 60)
            now = await status(stack.peer)
            assert (now.state, now.version) == (rollout_pb2.ENGINE_STATE_FAILED, -1)
            assert "the decode loop ended" in now.failure
            await asyncio.sleep(0.2)
            assert stack.coordinator.answered == 0

    asyncio.run(scenario())


def test_draining_finishes_what_is_held_and_takes_no_more(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model))
            for i in range(20):
                stack.coordinator.issue(i, max_response_tokens=100)
            await until(lambda: len(stack.coordinator.leased) >= 4)
            stack.coordinator.draining.add(stack.replica.member_id)
            await stack.replica.draining.wait()
            await stack.replica.leases.finish()
            assert (await status(stack.peer)).state == rollout_pb2.ENGINE_STATE_DRAINING
            coordinator = stack.coordinator
            assert len(coordinator.leased) == coordinator.answered + len(coordinator.released) < 20
            assert coordinator.answered > 0

    asyncio.run(scenario())


def test_a_lease_granted_while_the_replica_stops_asking_is_given_back(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            stack.coordinator.withholds = True
            await stack.serve(job_spec(tied_model))
            stack.coordinator.issue(0)
            await until(lambda: stack.replica.leases.asking)
            stack.replica.drain()
            stack.coordinator.withholds = False
            await stack.replica.leases.finish()
            assert stack.coordinator.released == list(stack.coordinator.leased) == ["lease-0"]

    asyncio.run(scenario())


def test_draining_past_its_deadline_gives_leases_back(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            rollout = {"samples_per_prompt": 16, "max_response_tokens": 6000}
            await stack.serve(job_spec(tied_model, rollout=rollout, trainer={"token_budget": 8192}))
            for i in range(4):
                stack.coordinator.issue(i, samples=16, max_response_tokens=6000)
            await until(lambda: stack.coordinator.leased)
            await drain(stack.replica, stack.membership, asyncio.Queue(), drain_s=0.1)
            await stack.replica.close()
            held = set(stack.coordinator.leased) - {f"lease-{p[2:]}" for p in stack.coordinator.groups}
            assert held and set(stack.coordinator.released) == held

    asyncio.run(scenario())


def test_a_wrong_engine_option_is_told_and_the_next_configure_works(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack:
            wrong = job_spec(tied_model, rollout={"engine_options": {"max_num_sequences": 3}})
            with pytest.raises(InvalidJob, match=r"rollout\.engine_options\.max_num_sequences"):
                await configure(stack.peer, wrong)
            failed = await status(stack.peer)
            assert failed.state == rollout_pb2.ENGINE_STATE_FAILED
            assert "max_num_sequences" in failed.failure
            await stack.serve(job_spec(tied_model))
            assert (await status(stack.peer)).state == rollout_pb2.ENGINE_STATE_SERVING

    asyncio.run(scenario())
