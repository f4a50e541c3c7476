"""A trainer's ranks and a replica on hosts of their own: nothing assumes that all are on one machine."""

import time
from pathlib import Path

import pytest

from benchmarks.chaos.invariants import Terms
from benchmarks.chaos.job import job
from millrace.events import EventKind, TrainerConfigured
from millrace.ids import JobId
from tests.hosts.network import Network
from tests.hosts.services import HEAD, Services

pytestmark = pytest.mark.slow
STEPS = 6
CUT_S = 2.0


def test_a_job_over_hosts_outlasts_a_short_cut(tmp_path: Path) -> None:
    """Two ranks and a replica, each on a host of its own, beside the coordinator's. The trainer says that it gathers
    weights over hosts. A link that is cut for less than what counts as lost costs nobody anything."""
    spec = job(tmp_path, max_staleness=1)
    spec["schedule"]["save_every_steps"] = 0
    with Network([HEAD, "left", "right", "far"]) as network, Services(network, tmp_path, forked=True) as services:
        services.coordinator()
        services.ranks(["left", "right"])
        services.replica("far", "transformers")
        job_id = JobId(services.at_the_desk(lambda client: client.submit(spec)).id)
        services.until("the first step", lambda client: client.job(job_id).step >= 1, 120.0)
        network.cut("right")
        time.sleep(CUT_S)  # the fault itself, not a wait for something
        network.heal("right")
        services.until("steps after the cut", lambda client: client.job(job_id).step >= STEPS, 120.0)
        fleet = services.at_the_desk(lambda client: client.fleet())
        seen, found = services.stop(job_id, Terms(max_staleness=1))
        events = services.at_the_desk(lambda client: list(client.events(job_id, follow=False)))
    assert found == [] and seen.step >= STEPS
    assert [member.host for member in (*fleet.trainers, *fleet.replicas)] == ["left", "far"]
    configured = next(event.data for event in events if isinstance(event.data, TrainerConfigured))
    assert [warning.partition(":")[0] for warning in configured.warnings] == ["trainer.backend_options.fsdp_size"]
    lost = {EventKind.TRAINER_LOST, EventKind.MEMBER_OUT, EventKind.PUBLICATION_FAILED}
    assert not [event.message for event in events if event.kind in lost]
