"""`--help` of each service and of `export` answers at once: it imports what its options need, and not what it runs."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "fastapi", "redis", "pyarrow")


@pytest.mark.parametrize(
    "service",
    [
        "coordinator",
        "trainer",
        "trainer.launch",
        "trainer.checkpoints.export",
        "rollout",
        "rollout.launch",
        "environments",
    ],
)
def test_help_imports_nothing_heavy(service: str) -> None:
    program = f"""
import runpy, sys
sys.argv = ["{service}", "--help"]
try:
    runpy.run_module("services.{service}", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout.lower() and done.stdout.splitlines()[-1] == "LOADED []"
