"""The demo's job over six hosts learns while links are cut and throttled and processes are killed: `make test-hosts`.

Prints the seconds that each fault cost.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.invariants import Terms
from millrace.demo.run import MARGIN, Run
from millrace.demo.tasks import TRAIN
from millrace.ids import JobId
from tests.hosts import faults
from tests.hosts.faults import BOTH_NODES, NODES, SINGLE, TRAINERS
from tests.hosts.network import Network
from tests.hosts.scenario import Scenario
from tests.hosts.services import HEAD, Services

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]
SEED = 0
HOSTS = (HEAD, *TRAINERS, *NODES, SINGLE)
ALL = (
    faults.lose_a_replica,
    faults.kill_a_node,
    faults.lose_a_rank,
    faults.kill_a_rank,
    faults.lose_the_coordinator,
)


def demo_job(folder: Path, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """The demo's job without an end, with checkpoints and evaluations on the way."""
    tree = Run(folder, SEED, 100_000, backend).prepared().model_dump(mode="json")
    tree["schedule"]["save_every_steps"] = 5
    tree["evaluation"]["every_steps"] = 10
    tree["trainer"]["backend_options"] |= options
    tree["rollout"]["engine_options"]["vllm"]["tensor_parallel_size"] = len(NODES)
    return tree


def terms_of(job: dict[str, Any]) -> Terms:
    return Terms(
        job["schedule"]["max_staleness"],
        rows=TRAIN,
        seed=SEED,
        refused=frozenset(),
        prompts_per_step=job["schedule"]["prompts_per_step"],
        lease_s=job["rollout"]["lease_s"],
    )


@pytest.mark.parametrize(
    ("backend", "options", "strikes"),
    [
        pytest.param("fsdp2", {}, ALL, id="fsdp2"),
        pytest.param("megatron", {"pipeline_parallel": 2}, (faults.lose_a_rank,), id="megatron, a stage a host"),
    ],
)
def test_a_job_over_six_hosts_learns_through_faults(
    backend: str, options: dict[str, Any], strikes: Sequence[Callable[[Scenario], None]], tmp_path: Path
) -> None:
    job = demo_job(tmp_path / "demo", backend, options)
    terms = terms_of(job)
    with Network(HOSTS) as network, Services(network, tmp_path, forked=False) as services:
        services.coordinator()
        services.torchrun(TRAINERS)
        for number in range(len(NODES)):
            services.node(NODES, number)
        services.replica(SINGLE, "transformers")
        job_id = JobId(services.at_the_desk(lambda client: client.submit(job)).id)
        with contextlib.closing(Scenario(services, job_id, terms, (BOTH_NODES, SINGLE))) as scenario:
            scenario.begin()
            for strike in strikes:
                strike(scenario)
            slow = faults.publications_over_a_slow_link(scenario)
            before, after = scenario.held_out(lambda before, last: last >= before + MARGIN)
            ended, found = services.stop(job_id, terms)
    print(f"\n{backend}\n\n| fault | noticed | next step | all work again |\n|---|---|---|---|")
    print("\n".join(cost.row() for cost in scenario.costs))
    print(f"\n{slow}\nheld-out reward {before:.3f} → {after:.3f} in {ended.step} steps", flush=True)
    assert scenario.found + found == []
