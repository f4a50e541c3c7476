import json
import os
import subprocess
import sys

import pytest

from millrace.cli import doctor as probes
from millrace.cli.doctor import Verdict
from millrace.sandbox.boundaries import Boundary, Missing, listed
from millrace.sandbox.probe import missing

FORBIDDEN = """
import json
from dataclasses import asdict
from millrace.cli import doctor as probes
from tests.services.rollout.scoring.hostile_replica import become, forbid_namespaces
if USER: become(USER)
forbid_namespaces()
print(json.dumps(asdict(probes.sandbox())))
"""


def test_doctor_says_what_this_machine_gives() -> None:
    lacking = missing()
    found = probes.sandbox()
    assert found.missing == tuple(lacking)
    assert found.verdict is (Verdict.MISSING if lacking else Verdict.GOOD)
    assert bool(found.fix) is bool(lacking)


def test_doctor_says_whether_programs_of_answers_can_run() -> None:
    lacking = missing("programs")
    found = probes.programs()
    assert found.missing == tuple(lacking)
    assert found.verdict is (Verdict.MISSING if lacking else Verdict.GOOD)


@pytest.mark.slow
def test_doctor_lists_each_boundary_of_a_machine_without_namespaces() -> None:
    code = FORBIDDEN.replace("USER", "65533" if os.getuid() == 0 else "0")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if "unshare: Operation not permitted" in done.stderr:
        pytest.skip("this machine allows no user namespaces")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "missing" and "docs/running.md" in told["fix"]
    assert {each["boundary"] for each in told["missing"]} == set(Boundary) - {Boundary.LIMITS}
    assert all(f"{each['boundary']} ({each['reason']})" in told["found"] for each in told["missing"])


def test_missing_boundaries_are_listed_with_their_reasons() -> None:
    assert listed([Missing(Boundary.IPC, "a"), Missing(Boundary.USER, "b")]) == "ipc (a), user (b)"
