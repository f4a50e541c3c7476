"""The scripts of deploy/slurm on a real Slurm: `make test-cluster`."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from benchmarks.chaos.invariants import ALWAYS, QUIET, Terms, violations
from benchmarks.chaos.job import job
from benchmarks.chaos.observation import Observer
from millrace.client import Client
from millrace.errors import MillraceError
from millrace.ids import JobId
from millrace.rest import JobState, MemberState
from tests.cluster.slurm import PATH, Slurm, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
Seen = TypeVar("Seen")
ROOT = Path(__file__).parents[2]
QUIET_SERVICES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "PYTHONPATH": str(ROOT),
    "MILLRACE_PLAINTEXT": "1",
    "TMPDIR": "/a/folder/of/the/submitting/host",
}
TASKS = ("--ntasks-per-node=1", "--gpus-per-node=2")
GROUPS = ("--nodes=1", ":", "--nodes=2", "--gpus-per-node=2", ":", "--nodes=1", *TASKS)
NODES = [f"n{number}" for number in range(6)]
"""Those of the groups, and two for more replicas."""


class Cluster:
    """A Slurm, and what a person at its first node does."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.stack = folder / "stack"
        bin_folder = Path(sys.executable).parent
        self.environment = {
            **QUIET_SERVICES,
            "PATH": f"{bin_folder}:{PATH}",
            "MILLRACE_STACK": str(self.stack),
            "MILLRACE_ENGINE": "transformers",
            "MILLRACE_RANKS": "1",
        }
        head = slurm.network[slurm.nodes[0]]
        self._desk = ThreadPoolExecutor(1, initializer=head.enter)

    def close(self) -> None:
        self._desk.shutdown()

    def sbatch(self, *arguments: str) -> str:
        """The id of the job."""
        output = f"--output={self.folder / 'output-%j'}"
        return self.slurm.run("sbatch", "--parsable", output, *arguments, **self.environment).partition(";")[0]

    def state(self, slurm_job: str) -> str:
        return self.slurm.run("scontrol", "--oneliner", "show", "job", slurm_job).partition("JobState=")[2].split()[0]

    def is_down(self, node: str) -> bool:
        return "down" in self.slurm.run("sinfo", "--noheader", f"--nodes={node}", "--format=%T")

    def nodes(self, slurm_job: str) -> list[str]:
        """Of each group."""
        return self.slurm.run("squeue", "--noheader", "--format=%N", "--jobs", slurm_job).split()

    def until(self, what: str, look: Callable[[Client], Seen], timeout_s: float = 240.0) -> Seen:
        """Waits until `look` gives something at the first node."""
        found: list[Seen] = []

        def holds() -> bool:
            with contextlib.suppress(MillraceError, FileNotFoundError):
                if seen := self._desk.submit(self._look, look).result():
                    found.append(seen)
            return bool(found)

        try:
            self.slurm.until(what, holds, timeout_s)
        except AssertionError as error:
            outputs = "\n".join(log.read_text(errors="replace")[-9000:] for log in self.folder.glob("output-*"))
            raise AssertionError(f"{error}\n--- outputs\n{outputs}") from None
        return found[0]

    def _look(self, look: Callable[[Client], Seen]) -> Seen:
        address = self.slurm.network[self.slurm.nodes[0]].address
        with Client(f"http://{address}:7700", (self.stack / "token").read_text(), patience_s=0) as client:
            return look(client)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"no Slurm here: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, Slurm(NODES, Path(folder)) as slurm:
        cluster = Cluster(slurm, tmp_path)
        yield cluster
        cluster.close()


def test_a_job_of_sbatch_grows_and_outlasts_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    """Replicas are added by a job of their own. One of its nodes is lost, which costs nothing but the leases, also when
    Slurm has given the node up. The jobs drain when they are told."""
    spec: dict[str, Any] = job(tmp_path, max_staleness=1)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    whole = cluster.sbatch(*GROUPS, "deploy/slurm/job.sbatch", str(tmp_path / "job.yaml"))
    (job_id,) = cluster.until("the job is submitted", lambda client: [JobId(one.id) for one in client.jobs()])
    cluster.until("steps", lambda client: client.job(job_id).step >= 3)

    added = cluster.sbatch("--nodes=2", *TASKS, "deploy/slurm/replicas.sbatch")
    cluster.until("three replicas serve", lambda client: len(serving(client)) == 3)
    *_, first = cluster.nodes(whole)
    # The first one runs the batch script.
    left, lost = cluster.slurm.run("scontrol", "show", "hostnames", *cluster.nodes(added)).split()
    cluster.slurm.lose(lost)
    cluster.until("a replica is lost", lambda client: serving(client) == sorted([first, left]), 60)
    cluster.until("Slurm knows of it", lambda _: cluster.is_down(lost), 60)
    step = cluster.until("a step", lambda client: client.job(job_id).step)
    cluster.until("steps without that node", lambda client: client.job(job_id).step >= step + 4)
    assert cluster.state(whole) == cluster.state(added) == "RUNNING"

    cluster.until("it pauses", lambda client: client.pause(job_id) or True)
    cluster.until("it is paused", lambda client: client.job(job_id).state is JobState.PAUSED)
    with contextlib.closing(Observer(cluster.stack / "coordinator")) as observer:
        seen = observer.observe(job_id)
        assert seen is not None
        assert violations(seen, Terms(max_staleness=1), {**ALWAYS, **QUIET}) == []
    cluster.slurm.run("scancel", "--batch", "--signal=TERM", whole)
    cluster.slurm.run("scancel", "--signal=USR1", added)
    for one in (whole, added):
        cluster.until("it drains", lambda _, one=one: cluster.state(one) == "COMPLETED", 60)


def serving(client: Client) -> list[str]:
    """The hosts of the replicas that serve."""
    return sorted(one.host for one in client.fleet().replicas if one.state is MemberState.SERVING)
