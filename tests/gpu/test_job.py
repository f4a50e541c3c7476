"""A real job on two GPUs: Megatron-Core with Transformer Engine on one, an engine with CUDA graphs on the other."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engines import probe

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_learns_with_a_publication_after_every_step(engine: str, tmp_path: Path) -> None:
    if not (found := probe(engine)).ok:
        pytest.skip(found.why)
    report = learned(tmp_path, "--engine", engine)
    assert report["mismatch"]["rollout_corr/k3_kl/same_version"] < 0.005


@pytest.mark.gpu(3)
def test_two_engines_in_one_job(tmp_path: Path) -> None:
    """MILLRACE_SGLANG_PYTHON names the interpreter of an environment with SGLang: the two exclude each other in one."""
    if not (found := probe("vllm")).ok or not (other := os.environ.get("MILLRACE_SGLANG_PYTHON")):
        pytest.skip(found.why or "MILLRACE_SGLANG_PYTHON is not set.")
    report = learned(tmp_path, "--engine", "vllm,sglang", "--replicas", "2", "--python", f"sglang={other}")
    for engine in ("vllm", "sglang"):
        assert report["mismatch"][f"rollout_corr/k3_kl/same_version/{engine}"] < 0.005


def learned(folder: Path, *options: str) -> dict[str, Any]:
    """The report of the demo's job with the grown model."""
    options = ("--size", "grown", "--backend", "megatron", "--steps", "40", *options)
    command = (sys.executable, "-m", "millrace.demo", *options, "--state", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = (dict(json.loads(path.read_text())) for path in folder.glob("output-*/report.json"))
    assert report["publications"]["count"] == 41 and report["publications"]["failed_attempts"] == 0
    return report
