"""The units of systemd and the scripts of Slurm, as far as they can be checked without running them."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout import __main__ as replica
from tests.cluster.test_chart import ROOT, read_by_services

SYSTEMD, SLURM = ROOT / "deploy/systemd", ROOT / "deploy/slurm"
UNITS = sorted(SYSTEMD.glob("*.service"))
OWN = {"MILLRACE_STACK", "MILLRACE_SLURM", "MILLRACE_SCRATCH", "MILLRACE_REQUEUES"}
"""Variables of the scripts. docs/cluster.md tells them."""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze (Debian: systemd)")
def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text().replace("/opt/millrace", sys.prefix)
        (tmp_path / unit.name).write_text(text)
    named = [str(tmp_path / unit.name.replace("@", "@0")) for unit in UNITS]
    command = ["systemd-analyze", "verify", "--man=no", *named]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_waits_for_the_drain_and_tells_the_main_process_alone(unit: Path) -> None:
    text = unit.read_text()
    assert "KillMode=mixed" in text
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    drain_s = 0.0 if "coordinator" in unit.name else inspect.signature(replica.main).parameters["drain_s"].default
    assert stop_s > drain_s + 30


def test_scripts_are_bash_and_their_variables_are_those_of_the_services() -> None:
    read = read_by_services()
    page = (ROOT / "docs/cluster.md").read_text()
    for script in [*SLURM.iterdir(), *UNITS]:
        if script.parent == SLURM:
            subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
        for name in set(re.findall(r"MILLRACE_[A-Z_]+", script.read_text())):
            assert f'"{name}"' in read or (name in OWN and f"`{name}`" in page), (script.name, name)
