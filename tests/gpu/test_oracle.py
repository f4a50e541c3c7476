"""Sharded publications over NCCL into real engines: every parameter of every worker is, bit for bit, what the engine's
own loader makes of the whole tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.rollout.engines import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
]
GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[2]
OPTIONS = {
    "vllm": {"enforce_eager": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28},
    "sglang": {
        "attention_backend": "triton",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "enforce_disable_flashinfer_allreduce_fusion": True,
    },
}
SPREAD = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("shape", "trainer", "workers"),
    [
        ("small", "tp=1", 1),
        ("small-moe", "ep=2", 1),
        ("small", "pp=2", 1),
        ("small", "tp=2", 2),
        ("small-moe", "ep=2", 2),
        ("small-moe", "ep=4", 1),
        ("small-moe", "ep=4", 2),
    ],
)
def test_whatever_shape_and_layout(engine: str, shape: str, trainer: str, workers: int, tmp_path: Path) -> None:
    if not (found := probe(engine)).ok:
        pytest.skip(found.why)
    if max(int(trainer[-1]), workers) > GPUS:
        pytest.skip(f"{max(int(trainer[-1]), workers)} GPUs are needed")
    options = OPTIONS[engine] | {SPREAD[engine]: workers}
    asked = ["--engine", engine, "--engine-options", json.dumps(options), "--shape", shape, "--trainer", trainer]
    asked += ["--modes", "shadow,inplace,broadcast", "--repeats", "2", "--output", str(tmp_path / "found.json")]
    asked += ["--share-gpus"] if int(trainer[-1]) + workers > GPUS else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.publication", *asked], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["as_the_oracle"] and result["workers"] == workers
    assert {figures["loader_bytes"]["p95"] for mode, figures in result["figures"].items() if mode != "broadcast"} == {
        0.0
    }
