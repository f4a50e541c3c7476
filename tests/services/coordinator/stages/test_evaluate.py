"""Evaluations beside training, and what is told of one whose prompts do not all have a score."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from millrace.contracts.v1 import common_pb2
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.peers import SimulatedReplica, SimulatedTrainer


@scenario
async def test_a_held_out_score_says_of_how_many_prompts_it_is(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Two of five held-out prompts fail at first, then all: that is told and ends no job. The score is the `acc`."""

    def reward(lease: Any, version: int, chance: Any) -> float | None:
        if lease.purpose == common_pb2.PURPOSE_TRAIN:
            return chance.random()
        return None if version or json.loads(lease.ground_truth) in ("1", "2") else 7.0

    async def adds_acc(request: Any) -> None:
        for place, trajectory in enumerate(request.group.trajectories):
            trajectory.reward_details = json.dumps({"acc": place == 0})

    await cluster.trainer()
    replica = await cluster.replica(reward=reward)
    replica.faults["Complete"] = adds_acc
    spec["evaluation"] |= {"samples_per_prompt": 2}
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED
    assert (job.evaluation_before, str(job.evaluation_before_coverage)) == (0.5, "3 of 5")
    assert (job.evaluation_last, job.evaluation_step, str(job.evaluation_last_coverage)) == (None, 6, "0 of 5")
    rows = {row.step: row.values for row in await asyncio.to_thread(cluster.coordinator.client.metrics, job.id, -1)}
    assert rows[0]["evaluation/held_out"] == rows[0]["val-core/sums/acc/mean@2"] == 0.5
    assert (rows[0]["val-aux/scored_prompts"], rows[0]["val-aux/asked_prompts"]) == (3, 5)
    assert rows[6]["val-aux/scored_prompts"] == 0 and "evaluation/held_out" not in rows[6]
    first, last = await cluster.events(job.id, "evaluation.done")
    assert (
        first.message.startswith("held-out 0.5 at version 0 on 3 of 5 prompts; ") and "ValueError: no" in first.message
    )
    assert last.message.startswith("none of the 5 held-out prompts could be scored; ")
    report = json.loads((Path(spec["output"]) / "report.json").read_text())
    assert report["reward"]["held_out_before_prompts"] == {"scored": 3, "asked": 5}
    assert report["reward"]["held_out_after_prompts"] == {"scored": 0, "asked": 5}
    assert report["evaluations"][1] == {"step": 6.0, "val-aux/scored_prompts": 0.0, "val-aux/asked_prompts": 5.0}
    written = (Path(spec["output"]) / "report.md").read_text()
    assert "| held-out | 0.5 (3 of 5) | – (0 of 5) |" in written
    url = f"http://127.0.0.1:{cluster.coordinator.http_port}/metrics"
    exported = (await asyncio.to_thread(httpx.get, url)).text
    assert f'millrace_job_evaluation_coverage{{job_id="{job.id}"}} 0.0' in exported
    assert f'millrace_job_evaluation_reward{{job_id="{job.id}"}}' not in exported


class Held:
    """Keeps the held-out answers of one version in the replicas until they are let go, and notes of which version the
    weights were under which each held-out answer ended."""

    def __init__(self, version: int, trainer: SimulatedTrainer, *replicas: SimulatedReplica) -> None:
        self.let_go = asyncio.Event()
        self.asked: list[str] = []
        """Held-out prompts that were begun, those of `version`."""
        self.made: set[tuple[str, int]] = set()
        """Held-out prompts that were answered, with the version that the replica held then."""
        self.stepped = asyncio.Event()
        """The trainer has taken the step after `version`."""
        self._version, self._trainer = version, trainer
        trainer.faults["StepDone"] = self._steps
        for replica in replicas:
            self.keep(replica)

    def keep(self, replica: SimulatedReplica) -> None:
        async def begins(lease: Any) -> None:
            if lease.prompt_id.startswith(f"e{self._version}-"):
                self.asked.append(lease.prompt_id)
                await self.let_go.wait()

        async def answers(request: Any) -> None:
            if request.group.purpose == common_pb2.PURPOSE_EVALUATION:
                self.made.add((request.group.prompt_id, replica.version))

        replica.faults["Generate"], replica.faults["Complete"] = begins, answers

    async def _steps(self, request: Any) -> None:
        if request.step == self._version + 1:
            self.stepped.set()

    def versions(self) -> set[tuple[int, int]]:
        """Version that an answer is asked of, and that it is of, of all held-out answers."""
        return {(int(prompt[1:].partition("-")[0]), version) for prompt, version in self.made}


async def exact(cluster: Cluster, job_id: str, trainer: SimulatedTrainer, evaluations: list[tuple[int, int]]) -> None:
    """The job has succeeded, each of its prompts was trained once, and the evaluations are these: step and version."""
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    ledger = await cluster.ledger(job_id)
    assert (ledger.trained, ledger.queued, ledger.leased, ledger.generated) == (6 * 4, 0, 0, 0)
    trained = [prompt for prompts in trainer.trained.values() for prompt in prompts]
    assert len(trained) == len(set(trained)) == 6 * 4
    done = await cluster.events(job_id, "evaluation.done")
    assert [(each.data.step, each.data.version) for each in done] == evaluations
    rows = await asyncio.to_thread(cluster.coordinator.client.metrics, job_id, -1)
    assert [row.step for row in rows if "evaluation/held_out" in row.values] == [step for step, _ in evaluations]
    assert all(row.values["timing_s/testing_wait"] >= 0 for row in rows if "timing_s/testing" in row.values)
    assert trainer.stalest <= 1


@scenario
async def test_the_trainer_steps_beside_an_evaluation(cluster: Cluster, spec: dict[str, Any]) -> None:
    """And replicas hold the version until its last held-out answer, while they generate for training too."""
    trainer, replica = await cluster.trainer(), await cluster.replica()
    held = Held(2, trainer, replica)
    spec["evaluation"] |= {"every_steps": 2}
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(held.stepped.wait(), 60)
    await cluster.reached(job_id, 3)
    ledger = await until(lambda: cluster.ledger(job_id), lambda ledger: ledger.generated == 4)
    assert (ledger.trained, ledger.queued, ledger.leased) == (3 * 4, 0, 0), "as far as the staleness bound allows"
    assert (trainer.version, replica.version, len(held.asked)) == (3, 2, 5)
    first_of_the_step = replica.leased.index("e2-0")
    assert set(replica.leased[first_of_the_step : first_of_the_step + 5]) == set(held.asked), "they are leased first"
    held.let_go.set()
    await exact(cluster, job_id, trainer, [(0, 0), (2, 2), (4, 4), (6, 6)])
    assert held.versions() == {(0, 0), (2, 2), (4, 4), (6, 6)}
    assert replica.publications == [0, 1, 2, 3, 4, 5, 6]
    samples = await asyncio.to_thread(cluster.coordinator.client.samples, job_id, limit=500)
    assert {each.step for each in samples if each.purpose == "evaluation"} == {0, 2, 4, 6}


@scenario
async def test_a_job_is_paused_when_replicas_have_the_trainers_version(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Not while an evaluation keeps them at the version before."""
    trainer, replica = await cluster.trainer(), await cluster.replica()
    held, client = Held(2, trainer, replica), cluster.coordinator.client
    spec["evaluation"] |= {"every_steps": 2}
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(held.stepped.wait(), 60)
    await cluster.reached(job_id, 3)
    await asyncio.to_thread(client.pause, job_id)
    held.let_go.set()
    paused = await until(lambda: cluster.job(job_id), lambda job: job.state is JobState.PAUSED)
    assert paused.step == trainer.version == replica.version == 3
    await asyncio.to_thread(client.resume, job_id)
    await exact(cluster, job_id, trainer, [(0, 0), (2, 2), (4, 4), (6, 6)])


@scenario
async def test_a_job_that_a_held_out_score_may_end_waits_for_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(), await cluster.replica()
    held = Held(2, trainer, replica)
    spec["evaluation"] |= {"every_steps": 2}
    spec["schedule"]["stop_when"] = {"solved_at": 1e3}
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, held.asked), lambda asked: len(asked) == 5)
    await until(lambda: cluster.ledger(job_id), lambda ledger: ledger.generated == 2 * 4)
    assert trainer.version == 2
    held.let_go.set()
    await exact(cluster, job_id, trainer, [(0, 0), (2, 2), (4, 4), (6, 6)])


@scenario
async def test_an_evaluation_outlives_the_coordinator_and_a_replica(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Both die while the trainer is a step ahead. The replica that is left gives the other's answers, of the version
    that both held; one that joins gets the trainer's version and none of those prompts."""
    trainer, dies, stays = await cluster.trainer(), await cluster.replica(), await cluster.replica()
    held = Held(2, trainer, dies, stays)
    spec["evaluation"] |= {"every_steps": 2, "prompts": 5}
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(held.stepped.wait(), 60)
    await cluster.reached(job_id, 3)
    await until(lambda: asyncio.sleep(0, held.asked), lambda asked: len(asked) == 5)
    await asyncio.to_thread(cluster.coordinator.kill)
    await dies.die()
    cluster.members.remove(dies)
    await asyncio.to_thread(cluster.coordinator.start)
    joins = await cluster.replica()
    held.keep(joins)
    await until(lambda: asyncio.sleep(0, joins.version), lambda version: version == 3)
    assert stays.version == 2
    held.let_go.set()
    await exact(cluster, job_id, trainer, [(0, 0), (2, 2), (4, 4), (6, 6)])
    assert held.versions() == {(0, 0), (2, 2), (4, 4), (6, 6)}
    assert not any(prompt.startswith("e2-") for prompt in joins.leased)


@scenario
async def test_the_next_version_is_evaluated_where_no_replica_has_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, dies = await cluster.trainer(), await cluster.replica()
    held = Held(2, trainer, dies)
    spec["evaluation"] |= {"every_steps": 2}
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(held.stepped.wait(), 60)
    await cluster.reached(job_id, 3)
    await dies.die()
    cluster.members.remove(dies)
    held.keep(await cluster.replica())
    await exact(cluster, job_id, trainer, [(0, 0), (3, 3), (4, 4), (6, 6)])
    assert held.versions() == {(0, 0), (3, 3), (4, 4), (6, 6)}
    told = (await cluster.events(job_id, "evaluation.done"))[1]
    assert "at version 3 on 5 of 5 prompts, instead of version 2, which no replica had any more" in told.message


@scenario
async def test_the_last_evaluation_needs_no_trainer(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(), await cluster.replica()
    held = Held(6, trainer, replica)
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, held.asked), lambda asked: len(asked) == 5)
    await until(lambda: cluster.events(job_id, "checkpoint.saved"))  # for which it is needed
    await trainer.die()
    cluster.members.remove(trainer)
    await until(lambda: cluster.events(job_id, "member.died"))
    held.let_go.set()
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    assert not await cluster.events(job_id, "trainer.lost")


@scenario
async def test_a_trainer_that_goes_back_makes_the_evaluation_due_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It dies a step after version 2, whose evaluation is in progress, and comes back at version 2 of its own."""
    first, replica = await cluster.trainer(), await cluster.replica()
    held = Held(2, first, replica)
    spec["evaluation"] |= {"every_steps": 2}
    spec["schedule"] |= {"save_every_steps": 2, "save_in_background": False}
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(held.stepped.wait(), 60)
    await cluster.reached(job_id, 3)
    await first.die()
    cluster.members.remove(first)
    second = await cluster.trainer()
    await until(lambda: cluster.events(job_id, "job.rewound"))
    held.let_go.set()
    await exact(cluster, job_id, second, [(0, 0), (2, 2), (4, 4), (6, 6)])
    assert held.versions() == {(0, 0), (2, 2), (4, 4), (6, 6)}
