"""The trainer is killed at random instants of its steps: begin, part, update, publication, save, idle.

While there is none, replicas go on up to the staleness bound. What they made is trained as far as its weights exist
again, and only the rest is generated again. `make test` has one instant. All ten, with the figures of BENCHMARKS.md:
`pytest -s tests/e2e/test_trainer_kills.py`.
"""

import json
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis

from millrace.contracts.v1 import common_pb2
from services.coordinator.redis_server import RedisServer
from services.coordinator.state.group import GroupSummary
from tests.e2e.conftest import adds_up, finished, until, vowels_job
from tests.forked import Forked
from tests.models import save_tiny_model
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.trainer.process import TrainerProcess, trainer

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(600)]

PER_STEP, STALENESS, STEPS = 4, 1, 4
BOUND = (STALENESS + 1) * PER_STEP
"""Groups that replicas complete without a trainer."""
MOMENTS = {
    "part": ("AddPart", False, 0.2),
    "update": ("Step", False, 0.4),
    "after the update": ("Step", True, 0.05),
    "prepare": ("PreparePublication", False, 0.05),
    "transfer": ("TransferPublication", False, 0.05),
    "end of a publication": ("FinishPublication", False, 0.02),
    "idle": ("FinishPublication", True, 0.3),
    "begin of a save": ("Save", False, 0.02),
    "save in the background": ("FinishSave", False, 0.1),
    "after a save": ("FinishSave", True, 0.2),
}
"""Moment → the method that starts the clock, whether when it has answered, and the longest delay in seconds."""


@dataclass(frozen=True)
class Instant:
    moment: str
    delay_s: float


def draw(seed: int) -> list[Instant]:
    """One instant of each moment, in a random order."""
    rng = random.Random(f"instants {seed}")
    return [Instant(m, rng.uniform(0.0, MOMENTS[m][2])) for m in rng.sample(sorted(MOMENTS), len(MOMENTS))]


INSTANTS = draw(32)
ONE = [instant for instant in INSTANTS if instant.moment == "prepare"]
"""The job goes back: no checkpoint has the version that is to be published."""


@dataclass
class Absence:
    """What happened from a kill until the next trainer was started."""

    instant: Instant
    groups: int
    """Groups that the replica completed."""
    tokens: int
    """Tokens of their answers."""
    seconds: float
    """From the kill to the last of them, with which there were as many as the bound allows."""
    newest: list[int]
    """The newest version of each complete group's tokens, of those from before the kill too."""


class KilledJob:
    """A job whose trainer is killed; the coordinator and one replica live on."""

    def __init__(self, folder: Path, coordinator: CoordinatorProcess, steps: int) -> None:
        self.folder, self.coordinator, self.client = folder, coordinator, coordinator.client
        self.doom = folder / "doom"
        self.absences: list[Absence] = []
        self._running = ExitStack()
        self._redis = redis.Redis.from_url(RedisServer(coordinator.folder / "redis").url)
        arguments = ("--coordinator", coordinator.address, "--engine", "transformers", "--host", "127.0.0.1")
        self._replica = Forked("services.rollout", (*arguments, "--port", "0"), {}, folder / "replica.log")
        self.trainer = self._another_trainer()
        job = vowels_job(folder, save_tiny_model(folder / "model", tied=True))
        job["rollout"] |= {"max_response_tokens": 96, "samples_per_prompt": 2, "engine_options": {"max_num_seqs": 4}}
        job["trainer"] |= {"token_budget": 256, "streaming": True}
        job["schedule"] = {
            "steps": steps,
            "prompts_per_step": PER_STEP,
            "max_staleness": STALENESS,
            "save_every_steps": 2,
        }
        self.job = self.client.submit(job).id

    def _another_trainer(self) -> TrainerProcess:
        at: Any = SimpleNamespace(address=self.coordinator.address, script=SimpleNamespace(members={}))
        log = self.folder / f"trainer-{len(self.absences)}.log"
        running = trainer(at, log, module="tests.e2e.doomed_trainer", DOOM=str(self.doom))
        self.trainer = self._running.enter_context(running)
        return self.trainer

    def kill(self, instant: Instant) -> None:
        """Has the trainer kill itself at that instant, and starts the next one when the replica has made what the
        staleness bound allows."""
        method, after, _ = MOMENTS[instant.moment]
        struck = Path(f"{self.doom}.struck")
        struck.unlink(missing_ok=True)
        whole = json.dumps({"method": method, "after": after, "delay_s": instant.delay_s})
        (self.folder / "doom.new").write_text(whole)
        (self.folder / "doom.new").rename(self.doom)
        until(f"the trainer dies: {instant}", lambda: self.trainer.process.poll() is not None, 120)
        until("the coordinator knows", lambda: len(self.backs()) > len(self.absences), 60)
        until("all is made that the bound allows", lambda: self._complete() == BOUND, 60)
        assert self.trainer.process.wait(0) == -9
        self.absences.append(self._absence(instant, float(struck.read_text())))
        self._another_trainer()

    def _complete(self) -> int:
        ledger = self.client.ledger(self.job)
        assert ledger.issued == ledger.queued + ledger.leased + ledger.generated + ledger.trained + ledger.dropped
        assert ledger.generated <= BOUND
        return ledger.generated

    def _absence(self, instant: Instant, since: float) -> Absence:
        ledger = f"millrace:job:{self.job}:train"
        summaries = map(GroupSummary.from_json, self._redis.hvals(f"{ledger}:summaries"))
        made = [summary for summary in summaries if summary.completed_s > since]
        tokens = sum(sum(each.response_tokens) for each in made)
        last = max((each.completed_s for each in made), default=since)
        groups = [common_pb2.Group.FromString(group) for group in self._redis.hvals(f"{ledger}:groups")]
        return Absence(instant, len(made), tokens, last - since, list(map(_newest, groups)))

    def completions(self) -> int:
        """Groups that the coordinator took, of all attempts."""
        lines = httpx.get(f"{self.client.url}/metrics", trust_env=False).text.splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("millrace_groups_total{")))

    def backs(self) -> list[Any]:
        """For each trainer that was lost, how the job went back; None if it did not."""
        found: list[Any] = []
        for event in self.client.events(self.job, follow=False):
            if event.kind == "trainer.lost":
                found.append(None)
            elif event.kind == "job.rewound":
                found[-1] = event.data
        return found

    def late(self) -> int:
        """Groups that came too late for the staleness bound, as slow ones may, and were generated again."""
        events = self.client.events(self.job, follow=False)
        return sum(len(event.data.prompts) for event in events if event.kind == "group.stale")

    def end(self) -> None:
        self._running.close()
        self._redis.close()
        self._replica.terminate()
        self._replica.wait(60)


def _newest(group: common_pb2.Group) -> int:
    return max(span.version for trajectory in group.trajectories for span in trajectory.versions)


def test_every_moment_is_drawn() -> None:
    assert sorted(instant.moment for instant in INSTANTS) == sorted(MOMENTS) and draw(32) == INSTANTS != draw(33)


@pytest.mark.parametrize("instants", [ONE, pytest.param(INSTANTS, marks=pytest.mark.matrix)], ids=["one", "ten"])
def test_nothing_is_lost_or_generated_twice_while_there_is_no_trainer(instants: list[Instant], tmp_path: Path) -> None:
    with running(tmp_path / "coordinator") as coordinator:
        whole = KilledJob(tmp_path, coordinator, STEPS * (len(instants) + 1))
        try:
            for instant in instants:
                before = whole.client.job(whole.job).step
                until("the job trains", lambda least=before: whole.client.job(whole.job).step > least, 120)
                whole.kill(instant)
            view = finished(whole.client, whole.job)
            check(whole)
            adds_up(whole.client, view, PER_STEP)
        finally:
            whole.end()


def check(whole: KilledJob) -> None:
    """Every group that was completed is accounted for."""
    lost, again, kept = 0, 0, 0
    for absence, back in zip(whole.absences, whole.backs(), strict=True):
        print(line(absence, back))
        if back is None:
            kept += BOUND
            continue
        valid = sum(newest <= back.version for newest in absence.newest)
        assert (back.kept, back.discarded) == (valid, BOUND - valid), (absence, back)
        kept, again, lost = kept + valid, again + back.discarded, lost + (back.lost - back.version) * PER_STEP
    trained, late, found = whole.client.ledger(whole.job).trained, whole.late(), whole.completions()
    print(f"{kept} groups stayed, {again} were generated again, {lost} trained again, {late} were late; {found} in all")
    assert any(absence.groups for absence in whole.absences)
    assert found == trained + again + lost + late, whole.client.ledger(whole.job)


def line(absence: Absence, back: Any) -> str:
    """A row of the table in BENCHMARKS.md."""
    went = "as it was" if back is None else f"{back.lost} to {back.version}"
    stay = BOUND if back is None else back.kept
    figures = f"{absence.groups} | {absence.tokens} | {absence.tokens / max(absence.seconds, 1e-3):,.0f}"
    return f"| {absence.instant.moment} + {absence.instant.delay_s * 1e3:.0f} ms | {figures} | {went} | {stay} |"
