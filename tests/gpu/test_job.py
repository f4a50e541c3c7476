"""A real job on two GPUs: Megatron-Core with Transformer Engine on one, an engine with CUDA graphs on the other."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.rollout.engines import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_learns_with_a_publication_after_every_step(engine: str, tmp_path: Path) -> None:
    if not (found := probe(engine)).ok:
        pytest.skip(found.why)
    options = ("--size", "grown", "--backend", "megatron", "--engine", engine, "--steps", "40")
    command = (sys.executable, "-m", "demo", *options, "--state", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("output-*/report.json"))
    assert report["publications"]["count"] == 41 and report["publications"]["failed_attempts"] == 0
    assert report["mismatch"]["rollout_corr/k3_kl"] < 0.005
