"""Replicas that a coordinator starts and stops as jobs of a real Slurm: `make test-cluster`."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
STEP = """#!/bin/bash
# Stands in for a replica: it drains at USR1, which lasts until its host has the file `drained`.
trap 'echo drains >> {folder}/told; until [[ -e {folder}/drained ]]; do sleep 0.1; done; exit 0' USR1
echo started >> {folder}/told
while true; do sleep 0.1; done
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=4 --output={folder}/output-%j
srun --cpus-per-task=4 {folder}/step.sh &
while kill -0 $! 2>/dev/null; do wait $! && status=0 || status=$?; done
exit "$status"
"""
SCALE = """
import asyncio, sys
from services.coordinator.scaling.scalers import SlurmScaler
async def play():
    scaler = SlurmScaler(sys.argv[2:])
    if sys.argv[1] != "current":
        await scaler.set(int(sys.argv[1]))
    print(await scaler.current())
asyncio.run(play())
"""


def test_replicas_are_jobs_that_drain(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"no Slurm here: {reason}")
    for name, text in (("step.sh", STEP), ("replica.sbatch", SCRIPT)):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, Slurm(["a"], Path(folder)) as slurm:
        replica = str(tmp_path / "replica.sbatch")

        def scaled(script: str, wanted: int | None = None) -> int:
            """Each time as a coordinator that has just been started, on the node that /etc/hosts is made for."""
            asked = "current" if wanted is None else str(wanted)
            return int(slurm.run(sys.executable, "-c", SCALE, asked, "--comment=one more", script))

        def told(word: str) -> int:
            path = tmp_path / "told"
            return path.read_text().split().count(word) if path.exists() else 0

        def states() -> list[str]:
            return sorted(slurm.run("squeue", "--noheader", "--format=%T").split())

        assert scaled(replica) == 0
        scaled(replica, 3)  # the node has room for two
        slurm.until("two replicas run", lambda: told("started") == 2, 60)
        assert states() == ["PENDING", "RUNNING", "RUNNING"] and scaled(replica) == 3
        scaled(replica, 2)
        slurm.until("the one that waits goes first", lambda: states() == ["RUNNING", "RUNNING"], 60)
        assert told("drains") == 0 and scaled(replica) == 2
        scaled(replica, 1)
        slurm.until("one drains", lambda: told("drains") == 1, 60)
        assert states() == ["RUNNING", "RUNNING"] and scaled(replica) == 1
        scaled(replica, 1)
        (tmp_path / "drained").touch()
        slurm.until("it has ended", lambda: states() == ["RUNNING"], 60)
        assert scaled(replica) == 1 and told("drains") == 1
        assert scaled("other.sbatch") == 0
