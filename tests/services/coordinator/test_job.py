"""A job from submission to report, with simulated peers over real gRPC and a real Redis."""

import asyncio
import itertools
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.contracts.v1 import common_pb2
from millrace.drops import DropReason
from millrace.errors import Unavailable
from millrace.rest import JobRequest, JobState, WarningCause
from tests.services.coordinator.cluster import Cluster, named, scenario, until


@scenario
async def test_a_job_runs_to_its_report(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _, _ = await cluster.trainer(), await cluster.replica(), await cluster.replica()
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert (job.step, job.steps, job.version) == (6, 6, 6)
    assert set(trainer.every.values()) == {1} and len(trainer.every) == 24
    assert trainer.stalest <= 1
    ledger = await cluster.ledger(job.id)
    assert (ledger.issued, ledger.trained, ledger.queued, ledger.leased, ledger.generated) == (24, 24, 0, 0, 0)
    rows = cluster.coordinator.client.metrics(job.id)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    owned = ("critic/score/mean", "response_length/clip_ratio", "timing_s/update_weights", "actor/grad_norm")
    for name in (*owned, "training/epoch", "timing_s/reward", "timing_per_token_ms/gen", "response/aborted_ratio"):
        assert all(name in row.values for row in rows), name
    parts = ("timing_s/gen", "timing_s/train", "timing_s/update_weights")
    assert all(row.values["timing_s/step"] == sum(row.values[part] for part in parts) for row in rows)
    assert job.evaluation_before is not None and job.evaluation_last is not None
    assert job.evaluation_last > job.evaluation_before + 5
    assert job.checkpoint == str(Path(spec["output"]) / "checkpoints" / "step-6")
    opened = await cluster.events(job.id, "data.opened")
    assert [(each.data.section, each.data.rows) for each in opened][:1] == [("data", 48)]
    assert "prompt from prompt, ground truth from reward_model.ground_truth" in opened[0].data.description[0]
    report = json.loads((Path(spec["output"]) / "report.json").read_text())
    assert report["ledger"]["trained"] == 24 and report["publications"]["count"] >= 7
    written = (Path(spec["output"]) / "report.md").read_text().splitlines()
    assert "## Ledger" in written
    assert "| weights | 5.5 → – | 5.25 → 5.06 |" in written and "| rest | – | – → 1.5 |" in written
    assert "| logits | – | 1 → – |" in written


@scenario
async def test_what_the_trainer_read_of_shown_groups_is_kept(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    job = await cluster.ended(await cluster.submit(spec | {"tracking": {"samples_per_step": 2}}))
    assert job.state is JobState.SUCCEEDED
    samples = [each for each in cluster.coordinator.client.samples(job.id, limit=500) if each.purpose == "train"]
    assert len({each.prompt_id for each in samples}) == 2 * job.step
    assert [each.advantage for each in samples] == [1.5] * len(samples)  # the mean of 0, 1, 2, 3
    url = f"http://127.0.0.1:{cluster.coordinator.http_port}/v1/jobs/{job.id}/tokens/{samples[0].record}"
    tokens = (await asyncio.to_thread(httpx.get, url)).json()
    assert len(tokens) > 1
    for each in tokens:
        assert each["advantages"] == [None] * 3 + [0.0, 1.0, 2.0, 3.0]
        assert each["trainer_logprobs"][:3] == [None] * 3
        assert each["trainer_logprobs"][3:] == pytest.approx([-1.1] * 4)


def strict(text: str) -> Any:
    """JSON as it is for everybody but Python."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@scenario
async def test_metrics_that_are_not_finite_are_kept_and_read(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()

    async def overflow(_: object) -> None:
        trainer.last.metrics.update(
            {"actor/grad_norm": math.inf, "actor/pg_loss": -math.inf, "rollout_corr/kl": math.nan}
        )

    trainer.faults["StepDone"] = overflow
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    rows = [row.values for row in cluster.coordinator.client.metrics(job.id)]
    assert [row["actor/grad_norm"] for row in rows] == [math.inf] * 6
    assert all(row["actor/pg_loss"] == -math.inf and math.isnan(row["rollout_corr/kl"]) for row in rows)
    async with httpx.AsyncClient(trust_env=False) as http:
        url = f"http://127.0.0.1:{cluster.coordinator.http_port}/v1/jobs/{job.id}/metrics"
        told = strict((await http.get(url)).text)[-1]["values"]
    assert (told["actor/grad_norm"], told["actor/pg_loss"], told["rollout_corr/kl"]) == ("Infinity", "-Infinity", "NaN")
    report = strict((Path(spec["output"]) / "report.json").read_text())
    assert report["mismatch"]["rollout_corr/kl"] == "NaN"


@scenario
async def test_a_job_of_episodes(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Two trajectories of two turns each, from the lease to metrics and samples; 8 of 12 tokens are sampled ones."""
    trainer, replica = await cluster.trainer(), await cluster.replica(turns=2, trajectories=2)
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    client = cluster.coordinator.client
    ledger = await asyncio.to_thread(client.ledger, job.id)
    assert (ledger.trained, ledger.queued + ledger.leased + ledger.generated) == (6 * 4, 0)
    assert 0 < trainer.tokens == ledger.trained * 2 * 2 * 8 <= replica.tokens
    for row in await asyncio.to_thread(client.metrics, job.id, 1):
        found = row.values
        assert (found["num_turns/mean"], found["num_trajectories/max"]) == (4.0, 2.0)
        assert found["response_length/mean"] == 10 and found["response/sampled_ratio"] == 0.8
        assert found["perf/total_num_tokens"] == 4 * 2 * (3 + 10 + 5 + 10)
        assert found["critic/score/min"] >= 0.5
    samples = [s for s in await asyncio.to_thread(client.samples, job.id) if s.purpose == "train"]
    assert {(s.tokens, s.sampled_tokens, len(s.turns)) for s in samples} == {(10, 8, 2)}
    assert {s.episode for s in samples} == {0, 1} and samples[0].answer == "turn 0<tool>turn 1"


@scenario
async def test_nothing_is_stale_where_the_bound_is_zero(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica(seconds=0.02)
    spec["schedule"]["max_staleness"] = 0
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, trainer.stalest) == (JobState.SUCCEEDED, 0)


@scenario
async def test_jobs_run_one_after_another(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spec["schedule"]["steps"] = 2
    jobs = [await cluster.submit(named(spec, name)) for name in ("first", "second")]
    assert (await cluster.job(jobs[1])).state is JobState.QUEUED
    ended = [await cluster.ended(job_id) for job_id in jobs]
    assert [job.state for job in ended] == [JobState.SUCCEEDED] * 2
    assert ended[0].finished_s < ended[1].finished_s
    assert ended[1].queued_s > 0.5 * ended[0].ran_s > 0
    for job in ended:
        assert job.ran_s + job.queued_s == pytest.approx(job.finished_s - job.created_s, abs=0.2)
        told = json.loads((Path(job.spec["output"]) / "report.json").read_text())["job"]
        assert (told["seconds"], told["seconds_in_queue"]) == pytest.approx((job.ran_s, job.queued_s), abs=0.5)


@scenario
async def test_a_job_without_replicas_fails_in_time(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer()
    job = await cluster.ended(await cluster.submit(spec | {"deadlines": {"no_replica_s": 1.0}}))
    assert job.state is JobState.FAILED and "no replica has served the job for 1 s" in str(job.failure)


@scenario
async def test_a_job_that_no_replica_can_be_made_ready_for_fails_with_the_reason(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer()
    failure = Unavailable("vLLM did not start.", "free memory on the GPU.")
    for replica in [await cluster.replica(), await cluster.replica()]:
        replica.faults.once("Configure", failure, times=1000)
    job_id = await cluster.submit(spec | {"deadlines": {"no_replica_s": 1.0}})
    job = await cluster.ended(job_id)
    assert job.state is JobState.FAILED
    assert "2 are in the fleet." in str(job.failure) and f"could not be made ready: {failure}" in str(job.failure)
    fleet = await asyncio.to_thread(cluster.coordinator.client.fleet)
    assert str(failure) in {member.trouble for member in fleet.replicas}


@scenario
async def test_a_job_without_steps_only_evaluates(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["steps"] = 0
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step, job.steps, job.checkpoint) == (JobState.SUCCEEDED, 0, 0, None)
    assert job.evaluation_before is not None and job.evaluation_before == job.evaluation_last
    assert trainer.every == {} and job.report is not None
    (row,) = await asyncio.to_thread(cluster.coordinator.client.metrics, job.id, -1)
    assert any(name.startswith("val-core/") for name in row.values)


@scenario
async def test_pause_stops_between_steps_and_resume_goes_on(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(step_s=0.2), await cluster.replica()
    client = cluster.coordinator.client
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    asked = await asyncio.to_thread(client.pause, job_id)
    assert asked.pending is JobRequest.PAUSE and asked.status == "pausing"
    paused = await until(lambda: cluster.job(job_id), lambda job: job.state is JobState.PAUSED)
    await asyncio.sleep(0.8)
    assert (await cluster.job(job_id)).step == paused.step == trainer.version == replica.version < 6
    await asyncio.to_thread(client.resume, job_id)
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    assert set(trainer.every.values()) == {1}


@scenario
async def test_a_job_does_not_wait_for_a_trainer_while_it_is_paused(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, client = await cluster.trainer(step_s=0.2), cluster.coordinator.client
    await cluster.replica()
    job_id = await cluster.submit(spec | {"deadlines": {"no_replica_s": 2.0}})
    await cluster.reached(job_id, 1)
    await asyncio.to_thread(client.pause, job_id)
    await until(lambda: cluster.job(job_id), lambda job: job.state is JobState.PAUSED)
    await trainer.die()
    cluster.members.remove(trainer)
    await asyncio.to_thread(cluster.coordinator.stop)
    await asyncio.to_thread(cluster.coordinator.start)
    await asyncio.sleep(2.5)
    await asyncio.to_thread(client.resume, job_id)
    await asyncio.sleep(0.5)
    await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)


@scenario
async def test_a_group_that_comes_too_late_is_generated_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    late: list[str] = []

    async def holds_the_answer(request: Any) -> None:
        """Three groups are as if begun under version 0, long ago."""
        if replica.version >= 2 and len(late) < 3 and request.group.purpose == common_pb2.PURPOSE_TRAIN:
            late.append(request.group.prompt_id)
            request.group.trajectories[0].versions[0].version = 0

    trainer, replica = await cluster.trainer(), await cluster.replica()
    replica.faults["Complete"] = holds_the_answer
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and trainer.stalest <= 1
    ledger = await cluster.ledger(job.id)
    assert (ledger.issued, ledger.trained, ledger.dropped) == (24, 24, 0)
    assert len(late) == 3 and all(trainer.every[prompt] == 1 for prompt in late)
    events = cluster.coordinator.client.events(job.id)
    assert sorted(p for e in events if e.kind == "group.stale" for p in e.data.prompts) == sorted(late)


@scenario
async def test_a_group_that_comes_too_late_is_dropped_if_asked(cluster: Cluster, spec: dict[str, Any]) -> None:
    late: list[str] = []

    async def holds_the_answer(request: Any) -> None:
        if replica.version >= 2 and len(late) < 3 and request.group.purpose == common_pb2.PURPOSE_TRAIN:
            late.append(request.group.prompt_id)
            request.group.trajectories[0].versions[0].version = 0

    spec["schedule"]["too_stale"] = "drop"
    trainer, replica = await cluster.trainer(), await cluster.replica()
    replica.faults["Complete"] = holds_the_answer
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and trainer.stalest <= 1
    ledger = await cluster.ledger(job.id)
    assert (ledger.issued, ledger.trained, ledger.reasons) == (27, 24, {DropReason.TOO_STALE: 3})
    assert len(late) == 3 and not trainer.every.keys() & set(late)
    rows = [row.values for row in cluster.coordinator.client.metrics(job.id)]
    assert sum(row["training/too_stale_groups"] for row in rows) == 3
    assert all(0 <= row["trainer/idle_ratio"] <= 1 for row in rows)
    stale = [row["fully_async/count/stale_trajectory_processed"] for row in rows]
    lags = [row["training/off_policy/trajectory_staleness/max"] for row in rows]
    assert [after > before for before, after in itertools.pairwise([0.0, *stale])] == [lag > 0 for lag in lags]
    assert any(lags) and stale[-1] > 1


Steps = list[set[str]]


async def _steps_with_slow_prompts(cluster: Cluster, spec: dict[str, Any]) -> tuple[Steps, Steps, int]:
    """The prompts of each step as they were issued, and as they were trained: each fourth one is slow. With the most
    prompts that the replica held of them."""
    slow, held = [0], [0]

    async def generate(lease: Any) -> None:
        if lease.purpose == common_pb2.PURPOSE_TRAIN:
            slow[0] += 1
            held[0] = max(held[0], sum(one.purpose == lease.purpose for one in replica.held.values()))
            await asyncio.sleep(0.3 * (slow[0] % 4 == 1))

    spec["schedule"] |= {"carried_prompts": 8, "too_stale": "train"}
    spec["algorithm"] = {"correction": {"name": "tis_token"}}
    trainer, replica = await cluster.trainer(), await cluster.replica(capacity=64)
    replica.faults["Generate"] = generate
    job = await cluster.ended(await cluster.submit(spec))
    ledger = await cluster.ledger(job.id)
    assert job.state is JobState.SUCCEEDED and set(trainer.every.values()) == {1}
    assert (ledger.issued, ledger.trained) == (24, 24)
    issued = [prompt for prompt in replica.leased if prompt in trainer.every]
    return *([set(order[n : n + 4]) for n in range(0, 24, 4)] for order in (issued, list(trainer.every))), held[0]


@scenario
async def test_unfinished_answers_go_on_in_the_next_step(cluster: Cluster, spec: dict[str, Any]) -> None:
    issued, trained, held = await _steps_with_slow_prompts(cluster, spec)
    assert trained != issued, "steps close without the slow prompts"
    assert held == 2 * 4 + 8


@scenario
async def test_slow_answers_are_waited_for_if_the_job_says_so(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["schedule"]["wait_for_slow"] = True
    issued, trained, held = await _steps_with_slow_prompts(cluster, spec)
    assert trained == issued
    assert held == 2 * 4 + 8


@scenario
async def test_cancel_ends_a_running_a_paused_and_a_queued_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(step_s=0.2), await cluster.replica()
    client = cluster.coordinator.client
    jobs = [await cluster.submit(named(spec, name)) for name in ("running", "paused", "queued")]
    await asyncio.to_thread(client.cancel, jobs[2])
    assert (await cluster.job(jobs[2])).state is JobState.CANCELLED
    await cluster.reached(jobs[0], 1)
    assert (await asyncio.to_thread(client.cancel, jobs[0])).status == "cancelling"
    ended = await cluster.ended(jobs[0])
    assert (ended.state, ended.status, ended.pending) == (JobState.CANCELLED, "cancelled", None)
    assert ended.evaluation_before is not None and ended.evaluation_last is None
    report = (Path(ended.spec["output"]) / "report.md").read_text()
    assert f"**The job was cancelled:** {ended.id} was cancelled after step {ended.step}" in report
    assert f"{ended.step} of 6 steps" in report and "not evaluated: the job was cancelled |" in report
    ledger = await cluster.ledger(jobs[0])
    assert ledger.issued == ledger.trained + ledger.dropped and ledger.reasons == {
        DropReason.JOB_CANCELLED: ledger.dropped
    }
    await cluster.reached(jobs[1], 1)
    await asyncio.to_thread(client.pause, jobs[1])
    await until(lambda: cluster.job(jobs[1]), lambda job: job.state is JobState.PAUSED)
    await asyncio.to_thread(client.cancel, jobs[1])
    assert (await cluster.ended(jobs[1])).state is JobState.CANCELLED


@scenario
async def test_a_failed_reward_costs_its_group_only(cluster: Cluster, spec: dict[str, Any]) -> None:
    def reward(lease: Any, version: int, chance: Any) -> float | None:
        return None if json.loads(lease.ground_truth) in ("3", "7") else 1.0

    trainer, _ = await cluster.trainer(), await cluster.replica(reward=reward)
    spec["schedule"] |= {"steps": None, "passes": 1}
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step) == (JobState.SUCCEEDED, 12)
    ledger = await cluster.ledger(job.id)
    assert ledger.reasons[DropReason.REWARD_FAILED] >= 2 and ledger.issued == 48 + ledger.dropped
    assert all(count == 1 for count in trainer.every.values())
    samples = cluster.coordinator.client.samples(job.id, limit=1000)
    assert any(s.reward is None and s.reward_failure == "raised ValueError: no" for s in samples)
    (warning,) = [each for each in job.warnings if each.cause is WarningCause.REWARD_FAILURES]
    assert warning.message.startswith("reward or environment failed on ") and "ValueError: no" in warning.message


@scenario
async def test_a_reward_that_fails_on_too_many_prompts_fails_the_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Every other one, with equal rewards on the rest: neither the task nor the reward's answers are blamed."""

    def reward(lease: Any, version: int, chance: Any) -> float | None:
        return None if int(json.loads(lease.ground_truth)) % 2 else 1.0

    await cluster.trainer()
    await cluster.replica(reward=reward)
    spec["schedule"] |= {"steps": 12}
    spec["reward"]["max_failed_fraction"] = 0.3
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED
    assert "more than reward.max_failed_fraction: 0.3. The last one: " in str(job.failure)
    assert {warning.cause for warning in job.warnings} == {WarningCause.REWARD_FAILURES}


@scenario
async def test_a_job_whose_groups_all_fail_says_why(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica(reward=lambda *_: None)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED
    assert "(100%), more than reward.max_failed_fraction: 0.5. The last one: raised ValueError: no" in str(job.failure)
    spec["reward"]["max_failed_fraction"] = 1.0
    job = await cluster.ended(await cluster.submit(named(spec, "any share")))
    assert job.state is JobState.FAILED
    assert "produced no usable samples; the last one: reward_failed: raised ValueError: no" in str(job.failure)
    ledger = await cluster.ledger(job.id)
    assert ledger.issued == ledger.dropped


@scenario
async def test_groups_without_signal_are_replaced_until_the_bound(cluster: Cluster, spec: dict[str, Any]) -> None:
    def reward(lease: Any, version: int, chance: Any) -> float:
        return chance.random() if int(json.loads(lease.ground_truth)) % 2 else 1.0

    _, replica = await cluster.trainer(), await cluster.replica(reward=reward)
    spec["algorithm"] = {"drop_groups_without_signal": True}
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED
    ledger = await cluster.ledger(job.id)
    assert ledger.reasons[DropReason.NO_SIGNAL] > 0 and ledger.trained == 24
    assert all(row.values["training/groups_without_signal"] == 0 for row in cluster.coordinator.client.metrics(job.id))
    replica.shape.reward = lambda *_: 1.0
    failed = await cluster.ended(await cluster.submit(named(spec, "flat")))
    assert failed.state is JobState.FAILED and "had no signal" in str(failed.failure)


@scenario
async def test_equal_rewards_are_warned_of_once_and_reported(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica(reward=lambda *_: 1.0)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and job.step == 6
    (told,) = await cluster.events(job.id, "training.warning")
    assert (told.data.cause, told.data.value, told.data.steps) == (WarningCause.EQUAL_REWARDS, 1.0, 3)
    ((cause, step),) = [(warning.cause, warning.step) for warning in job.warnings]
    assert (cause, step) == (WarningCause.EQUAL_REWARDS, 3)
    report = (Path(spec["output"]) / "report.md").read_text()
    assert f"## Warnings\n\n* after step 3: {told.message}" in report


@scenario
async def test_checkpoints_are_kept_and_pruned(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spec["schedule"] |= {"save_every_steps": 1, "keep_checkpoints": 2}
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED
    kept = sorted(path.name for path in (Path(spec["output"]) / "checkpoints").iterdir())
    assert kept == ["step-5", "step-6"]


@scenario
async def test_the_best_checkpoint_is_kept_beside_the_newest(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spec["schedule"] |= {"save_every_steps": 1, "keep_checkpoints": 1, "keep_best": "-evaluation/held_out"}
    spec["evaluation"] |= {"every_steps": 1}  # held-out rewards grow: the smallest is that of step 1
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED
    folder = Path(spec["output"]) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step-1", "step-6"]
    assert (folder / "best").resolve() == (folder / "step-1").resolve()
    (told,) = await cluster.events(job.id, "checkpoint.best")
    row = cluster.coordinator.client.metrics(job.id)[0].values
    assert (told.data.step, told.data.value) == (1, row["evaluation/held_out"])


@scenario
async def test_a_solved_job_stops_and_has_succeeded(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spec["schedule"] |= {"stop_when": {"solved_at": -1000.0}}
    spec["evaluation"] |= {"every_steps": 2}
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step, job.steps) == (JobState.SUCCEEDED, 2, 2)
    (told,) = await cluster.events(job.id, "job.stopping")
    assert (told.data.step, told.data.cause) == (2, "solved") and "evaluation/held_out is " in told.message
    assert job.checkpoint == str(Path(spec["output"]) / "checkpoints" / "step-2") and job.evaluation_step == 2
    ledger = await cluster.ledger(job.id)
    assert ledger.trained == 8 and ledger.queued == ledger.leased == ledger.generated == 0


def spoil(spec: dict[str, Any], good: int, bad: int) -> None:
    """The job's data: so many of its rows, and so many that cannot be used."""
    path = Path(spec["data"]["files"][0])
    rows = path.read_text().splitlines(keepends=True)[:good]
    path.write_text("".join(rows) + '{"data_source": "sums", "prompt": 5, "reward_model": {}}\n' * bad)


@scenario
async def test_a_bad_row_costs_itself(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spoil(spec, good=48, bad=3)
    spec["schedule"] |= {"steps": None, "passes": 1}
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step) == (JobState.SUCCEEDED, 12)
    ledger = await cluster.ledger(job.id)
    assert ledger.trained == 48 and 0 < ledger.reasons[DropReason.BAD_ROW] <= 3
    dropped = await cluster.events(job.id, "prompt.dropped")
    assert "train.jsonl line " in dropped[0].message and "column prompt: 5: " in dropped[0].message


@scenario
async def test_rows_that_are_all_bad_fail_the_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spoil(spec, good=1, bad=99)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED and "bad_row" in str(job.failure)


@scenario
async def test_a_job_with_the_most_prompts_in_flight_heeds_a_cancel(cluster: Cluster, spec: dict[str, Any]) -> None:
    """A million prompts are issued 48 at a time, the rows of a pass."""
    await cluster.trainer()
    spec["schedule"] |= {"prompts_per_step": 500_000, "max_staleness": 1}
    job_id = await cluster.submit(spec)
    await until(lambda: cluster.ledger(job_id), lambda ledger: ledger.issued > 0)
    await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    job = await cluster.ended(job_id, within_s=30)
    assert job.state is JobState.CANCELLED and (await cluster.ledger(job_id)).issued < 500_000
