"""A backup of Redis and a copied output, taken to other hosts: the job goes on there, and nothing is trained twice."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.invariants import Terms
from benchmarks.chaos.job import job
from millrace.client import Client
from millrace.events import JobRewound, TrainerConfigured
from millrace.ids import JobId
from services.coordinator.store.snapshot import NeededJob, read
from tests.hosts.network import Host, Network
from tests.hosts.services import HEAD, ROOT, Services

pytestmark = [pytest.mark.slow, pytest.mark.matrix]  # tests/services/coordinator/test_backup.py covers the claim
EVERY = 3
"""Steps from one checkpoint to the next, as the job has them."""
HERE, THERE = (HEAD, "left", "far"), ("new-head", "new-left", "new-far")


def backup(host: Host, command: str, file: Path, state: Path) -> subprocess.CompletedProcess[str]:
    """`python -m services.coordinator.backup COMMAND FILE` on a host."""
    program = [sys.executable, "-m", "services.coordinator.backup", command, str(file), "--state-dir", str(state)]
    return subprocess.run(host.command(program), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def step(client: Client, job_id: JobId) -> int:
    return client.job(job_id).step


def saved(client: Client, job_id: JobId) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    path = client.job(job_id).checkpoint
    return int(path.rpartition("-")[2]) if path else 0


def lost_place(network: Network, folder: Path, spec: dict[str, Any]) -> tuple[JobId, Path, NeededJob]:
    """A job runs on the first hosts, and a backup is taken. Two checkpoints later all of them are gone. Answers the
    job, the backup, and what it says of the job."""
    file, output = folder / "backup", Path(spec["output"])
    with Services(network, folder / "here", forked=True) as services:
        services.coordinator()
        services.ranks([HERE[1]])
        services.replica(HERE[2], "transformers")
        job_id = JobId(services.at_the_desk(lambda client: client.submit(spec)).id)
        services.until(
            "steps after a checkpoint", lambda client: saved(client, job_id) and client.job(job_id).step > EVERY, 240.0
        )
        taken = backup(network[HEAD], "save", file, services.state)
        assert taken.returncode == 0 and f"{job_id} chaos: running" in taken.stdout, taken.stderr
        (needed,) = read(file)[0].jobs
        assert needed.step > needed.checkpoint_step > 0
        later = needed.checkpoint_step + EVERY
        services.until("a later checkpoint", lambda client: saved(client, job_id) >= later, 240.0)
    for host in HERE:
        network.cut(host)
    assert (output / "checkpoints" / f"step-{later}").is_dir()
    return job_id, file, needed


def test_a_job_goes_on_from_a_backup_on_other_hosts(tmp_path: Path) -> None:
    """The disk of the lost hosts is copied after the backup, so it has a checkpoint that the backup does not know."""
    spec = job(tmp_path, max_staleness=1)
    spec["schedule"] |= {"save_every_steps": EVERY, "keep_checkpoints": 100}
    with Network([*HERE, *THERE]) as network:
        job_id, file, needed = lost_place(network, tmp_path, spec)
        output, copied = Path(spec["output"]), tmp_path / "copied"
        output.rename(copied)
        later = copied / "checkpoints" / f"step-{needed.checkpoint_step + EVERY}"
        forgotten = {path.name: path.read_bytes() for path in (later / "state").iterdir()}
        with Services(network, tmp_path / "there", forked=True, head=THERE[0]) as services:
            shutil.copytree(copied, output, ignore=shutil.ignore_patterns(Path(needed.checkpoint).name))
            refused = backup(network[THERE[0]], "load", file, services.state)
            assert refused.returncode == 1 and needed.checkpoint in refused.stderr, refused.stderr
            shutil.rmtree(output)
            shutil.copytree(copied, output)
            restored = backup(network[THERE[0]], "load", file, services.state)
            assert restored.returncode == 0 and needed.checkpoint in restored.stdout, restored.stderr

            services.coordinator()
            services.ranks([THERE[1]])
            services.replica(THERE[2], "transformers")
            again = needed.checkpoint_step + EVERY
            services.until("a checkpoint again", lambda client: step(client, job_id) > again + 1, 240.0)
            events = services.at_the_desk(lambda client: list(client.events(job_id, follow=False)))
            seen, found = services.stop(job_id, Terms(max_staleness=1))
    assert found == []
    assert [event.data.version for event in events if isinstance(event.data, TrainerConfigured)][
        -1
    ] == needed.checkpoint_step
    (rewound,) = [event.data for event in events if isinstance(event.data, JobRewound)]
    assert (rewound.version, rewound.lost) == (needed.checkpoint_step, needed.step)
    rewritten = output / "checkpoints" / later.name / "state"
    assert seen.checkpoints.keys() >= {needed.checkpoint_step, again}
    assert {path.name: path.read_bytes() for path in rewritten.iterdir()} != forgotten
