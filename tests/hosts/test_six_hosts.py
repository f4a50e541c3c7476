"""The demo's job over six hosts learns while links are cut and throttled and processes are killed: `make test-hosts`.

Prints the seconds that each fault cost.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.invariants import Terms
from millrace.demo.run import MARGIN, prepared
from millrace.demo.task import TRAIN
from millrace.events import EventKind, MemberOut
from millrace.ids import JobId
from tests.hosts.network import Network, why_not
from tests.hosts.scenario import Scenario
from tests.hosts.services import HEAD, Services

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}"),
]
TRAINERS = ("trainer-0", "trainer-1")
REPLICAS = ("replica-0", "replica-1")
CUT_S = 20.0
"""Longer than the silence after which a replica, and a rank of the trainer, counts as lost."""
SLOW_MBIT_PER_S = 100.0
SEED = 0


def demo_job(folder: Path) -> dict[str, Any]:
    """The demo's job without an end, with checkpoints and evaluations on the way."""
    tree = prepared(folder, SEED, steps=100_000).model_dump(mode="json")
    tree["schedule"]["save_every_steps"] = 5
    tree["evaluation"]["every_steps"] = 10
    return tree


def test_a_job_over_six_hosts_learns_through_faults(tmp_path: Path) -> None:
    job = demo_job(tmp_path / "demo")
    terms = Terms(
        job["schedule"]["max_staleness"],
        rows=TRAIN,
        seed=SEED,
        refused=frozenset(),
        prompts_per_step=job["schedule"]["prompts_per_step"],
        lease_s=job["rollout"]["lease_s"],
    )
    with (
        Network([HEAD, *TRAINERS, *REPLICAS]) as network,
        Services(network, tmp_path, forked=False) as services,
    ):
        services.coordinator()
        services.torchrun(TRAINERS)
        for host in REPLICAS:
            services.replica(host, "transformers")
        job_id = JobId(services.at_the_desk(lambda client: client.submit(job)).id)
        with contextlib.closing(Scenario(services, job_id, terms, REPLICAS)) as scenario:
            scenario.steps(2)
            lose_a_replica(scenario)
            lose_a_rank(scenario)
            slow = slow_link(scenario)
            before, after = scenario.held_out(lambda before, last: last >= before + MARGIN)
            ended, found = services.stop(job_id, terms)
    print("\n| fault | noticed | next step | all work again |\n|---|---|---|---|")
    print("\n".join(cost.row() for cost in scenario.costs))
    print(f"\npublication, median: {slow[0]:.2f} s, over {SLOW_MBIT_PER_S:g} Mbit/s {slow[1]:.2f} s")
    print(f"held-out reward {before:.3f} → {after:.3f} in {ended.step} steps", flush=True)
    assert scenario.found + found == []


def lose_a_replica(scenario: Scenario) -> None:
    """The link of a replica is cut for longer than it may be silent: its leases go to the other one, and it returns."""
    host = REPLICAS[-1]
    member, network = scenario.member(host), scenario.services.network
    with scenario.fault(f"link of a replica's host cut for {CUT_S:g} s") as cost:
        network.cut(host)
        scenario.wait(CUT_S)
        network.heal(host)
    assert member in {event.data.member for event in cost.losses if isinstance(event.data, MemberOut)}


def lose_a_rank(scenario: Scenario) -> None:
    """The link of the trainer's second host is cut: the trainer names the rank and its host, and starts again."""
    host, network = TRAINERS[1], scenario.services.network
    with scenario.fault(f"link of a trainer's host cut for {CUT_S:g} s") as cost:
        network.cut(host)
        scenario.wait(CUT_S)
        network.heal(host)
    lost = [event.message for event in cost.losses if event.kind is EventKind.TRAINER_LOST]
    assert any(f"rank 1 on {host}" in message for message in lost), lost


def slow_link(scenario: Scenario) -> tuple[float, float]:
    """Median seconds of a publication at full speed, and with a slow link of the trainer's first host."""
    network = scenario.services.network
    fast_s = scenario.publishing_s(5)
    network.throttle(TRAINERS[0], SLOW_MBIT_PER_S)
    slow_s = scenario.publishing_s(5)
    network.release(TRAINERS[0])
    return fast_s, slow_s
