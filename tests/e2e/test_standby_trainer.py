"""A trainer that stands by takes the seat when the one in it is killed, at any moment of a step.

Answers are the most likely tokens, one after another: a job with kills and one without have the same weights, bit for
bit. `make test` has one kill, and one under `millrace up`. All moments, with the figures of BENCHMARKS.md:
`pytest -s -k moments tests/e2e/test_standby_trainer.py`.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import adds_up, finished, started, until, vowels_job
from tests.e2e.test_trainer_kills import INSTANTS, MOMENTS, Instant
from tests.forked import Forked
from tests.models import save_tiny_model
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.trainer.process import TrainerProcess, trainer

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(600)]

PER_STEP = 4
TAKES_OVER_S = 5.0
"""From the moment at which the coordinator knows that the trainer is lost until the next one has the job."""
ONE = [Instant("update", 0.01)]
WHOLE_STEPS = [instant for instant in INSTANTS if instant.moment != "part"]
"""The algorithm needs the batch of a step at once."""
ROWS = 8
"""So few that the prompts of a step have the same order when they are issued again, by their ids: sums of floats depend
on it."""
SAVES = 4
"""Steps between two checkpoints."""


class Job:
    """A job with two trainers; the coordinator and one replica live on."""

    def __init__(self, folder: Path, coordinator: CoordinatorProcess) -> None:
        self.folder, self.coordinator, self.client = folder, coordinator, coordinator.client
        self.doom = folder / "doom"
        self._running = ExitStack()
        self._trainers: list[TrainerProcess] = []
        self.id = ""

    def start_trainer(self) -> None:
        at: Any = SimpleNamespace(address=self.coordinator.address, script=SimpleNamespace(members={}))
        log = self.folder / f"trainer-{len(self._trainers)}.log"
        process = trainer(at, log, module="tests.e2e.doomed_trainer", DOOM=str(self.doom))
        self._trainers.append(self._running.enter_context(process))

    def submit(self, steps: int, output: str) -> None:
        job = vowels_job(self.folder, self.folder / "model", count=ROWS)
        job["data"]["shuffle"] = False
        job["output"] = str(self.folder / output)
        job["rollout"] |= {"max_response_tokens": 12, "samples_per_prompt": 2, "top_k": 1}
        job["rollout"]["engine_options"] = {"max_num_seqs": 1}
        job["algorithm"] = {"preset": "reinforce++"}
        job["trainer"] |= {"token_budget": 256, "optimizer": {"lr": 1e-3}}
        schedule = {"steps": steps, "prompts_per_step": PER_STEP, "max_staleness": 0}
        job["schedule"] = schedule | {"save_every_steps": SAVES, "keep_checkpoints": 64}
        self.id = self.client.submit(job).id

    def kill(self, instant: Instant) -> None:
        """Has the trainer in the seat kill itself, once another one holds a state after the last checkpoint."""
        until("a trainer stands by", self._stands_by, 120)
        assert not (self.folder / "killed" / "standby").exists(), "the state went over the disk"
        lost, (method, after, _) = len(self._events("trainer.lost")), MOMENTS[instant.moment]
        whole = json.dumps({"method": method, "after": after, "delay_s": instant.delay_s})
        (self.folder / "doom.new").write_text(whole)
        (self.folder / "doom.new").rename(self.doom)
        until(f"the trainer dies: {instant}", lambda: len(self._events("trainer.lost")) > lost, 120)
        until("the job goes on", lambda: len(self._steps_since(self._events("trainer.lost")[lost].time_s)) > 0, 120)

    def _stands_by(self) -> bool:
        trainers = [member for member in self.client.fleet().trainers if member.state == "serving"]
        job = self.client.job(self.id)
        return len(trainers) > 1 and trainers[1].version > max(0, job.step - 2)

    def _events(self, kind: str) -> list[Any]:
        return [event for event in self.client.events(self.id, follow=False) if event.kind == kind]

    def _steps_since(self, time_s: float) -> list[Any]:
        return [event for event in self._events("step.done") if event.time_s > time_s]

    def takeovers(self) -> list[tuple[float, float, str]]:
        """For each loss of a trainer: seconds until the next one had the job, seconds until it had made a step, and how
        the job's version changed."""
        found = []
        for lost in self._events("trainer.lost"):
            configured = next(e for e in self._events("trainer.configured") if e.time_s > lost.time_s)
            assert configured.data.stood_by, configured
            rewound = [e.data for e in self._events("job.rewound") if lost.time_s < e.time_s < configured.time_s + 1.0]
            went = f"{rewound[0].lost} to {rewound[0].version}" if rewound else "as it was"
            stepped = self._steps_since(lost.time_s)[0].time_s - lost.time_s
            found.append((configured.time_s - lost.time_s, stepped, went))
        return found

    def weights(self, output: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / output / "checkpoints" / f"step-{step}" / "state" / "rank-00000.safetensors")

    def end(self) -> None:
        self._running.close()


@contextmanager
def two_trainers(folder: Path) -> Iterator[Job]:
    save_tiny_model(folder / "model", tied=True)
    with running(folder / "coordinator") as coordinator:
        arguments = ("--coordinator", coordinator.address, "--engine", "transformers", "--host", "127.0.0.1")
        replica = Forked("services.rollout", (*arguments, "--port", "0"), {}, folder / "replica.log")
        job = Job(folder, coordinator)
        try:
            job.start_trainer()
            job.start_trainer()
            yield job
        finally:
            job.end()
            replica.terminate()
            replica.wait(60)


@pytest.mark.matrix  # test_standby_copies.py has copies of real ranks, test_supervisor.py one that takes over
@pytest.mark.parametrize("instants", [ONE, WHOLE_STEPS], ids=["one", "moments"])
def test_the_job_has_the_weights_of_one_without_a_kill(instants: list[Instant], tmp_path: Path) -> None:
    steps = 8 * len(instants) + 4
    with two_trainers(tmp_path) as job:
        job.submit(steps, "killed")
        for instant in instants:
            job.kill(instant)
            job.start_trainer()
        adds_up(job.client, finished(job.client, job.id), PER_STEP)
        takeovers = job.takeovers()
        for instant, (seconds, stepped, went) in zip(instants, takeovers, strict=True):
            print(f"| {instant.moment} + {instant.delay_s * 1e3:.0f} ms | {went} | {seconds:.2f} | {stepped:.2f} |")
        assert all(seconds < TAKES_OVER_S for seconds, _, _ in takeovers), takeovers
        killed, first = job.weights("killed", steps), job.weights("killed", SAVES)

        job.submit(steps, "whole")
        adds_up(job.client, finished(job.client, job.id), PER_STEP)
        whole = job.weights("whole", steps)
    assert killed.keys() == whole.keys() and any(not torch.equal(first[name], whole[name]) for name in whole)
    assert [name for name in whole if not torch.equal(killed[name], whole[name])] == []


@pytest.mark.matrix  # the test above has trainers of one rank
def test_millrace_up_keeps_a_trainer_of_two_ranks_ready(job: dict[str, Any], tmp_path: Path) -> None:
    """A rank of the one in the seat is killed. Its launcher starts it again, and then it stands by."""
    job["schedule"] |= {"steps": 12, "max_staleness": 0}
    job["rollout"]["max_response_tokens"] = 32
    with started(tmp_path / "state", replicas=1, engine="transformers", standby_trainers=1, ranks=2) as stack:
        client = stack.client()
        job_id = client.submit(job).id

        def stands_by() -> bool:
            return client.job(job_id).step > 3 and client.fleet().trainers[1].version > 1

        until("a trainer stands by", stands_by, 200)
        seat, next_one = client.fleet().trainers
        port = int(seat.address.rpartition(":")[2])
        serving = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port)
        rank_zero = psutil.Process(next(serving).pid)
        rank_zero.kill()
        adds_up(client, finished(client, job_id))
        configured = [e.data for e in client.events(job_id, follow=False) if e.kind == "trainer.configured"]
        assert [(each.member, each.stood_by) for each in configured] == [(seat.id, False), (next_one.id, True)]
        until("it is back", lambda: len([m for m in client.fleet().trainers if m.state == "serving"]) == 2, 60)
        assert client.fleet().trainers[0].id == next_one.id
