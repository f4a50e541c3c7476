"""Weights in host memory are packed on the GPU and sent over NCCL, as those of a GPU are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.weights.plans.manifest import Content
from services.trainer.backends import build
from services.trainer.protocol.backend import published
from services.trainer.protocol.microbatch import MicroBatch
from tests.gpu.test_fsdp2_offload import eight_layers, loss
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_shards import check_published
from tests.services.trainer.groups import job_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("lora", "contents"),
    [
        (None, [Content.MODEL]),
        ({"rank": 8, "merge": True}, [Content.MODEL]),
        ({"rank": 8, "merge": False}, [Content.BASE, Content.ADAPTER]),
    ],
    ids=["whole", "merged", "adapter"],
)
def test_messages_hold_what_is_exported_before_and_after_an_update(
    device: torch.device, tmp_path: Path, lora: dict[str, Any] | None, contents: list[Content]
) -> None:
    options = {"offload_parameters": True, "compile_layers": False}
    spec = job_spec(eight_layers(tmp_path / "model"), trainer={"token_budget": 32_768, "backend_options": options})
    if lora is not None:
        spec = type(spec).model_validate({**spec.model_dump(), "model": {**spec.model.model_dump(), "lora": lora}})
    backend: Any = build(spec, device)
    drawn = samples([(50, 150)] * 4)
    for update in range(2):
        if update:
            backend.forward_backward([MicroBatch.pack(drawn, range(4))], loss, temperature=1.0)
            backend.optimizer_step(lr=1e-2, gradient_scale=1.0)
        for content in contents:
            source = published(backend, content)
            memory = source.shards("bfloat16")
            assert memory is not None and memory.device == device
            if content is not Content.ADAPTER:
                assert all(buffer.is_pinned() for buffer in memory.buffers if buffer.numel())
            # Merged weights are computed on the GPU for messages, and in host memory for exports.
            merged = lora is not None and lora["merge"]
            check_published(source, "bfloat16", ulps=2 if merged else 0)


@pytest.mark.parametrize("lora", [[], ["--lora", "8"]], ids=["whole", "merged"])
def test_a_receiver_holds_the_same_bytes_without_a_copy_in_host_memory(lora: list[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    asked = ["--shape", "qwen3-0.6b", "--layers", "8", "--repeats", "2", *lora, "--output", str(found)]
    command = [sys.executable, "-m", "benchmarks.publication.offloaded", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = json.loads(found.read_text())["cases"]
    whole = cases["offloaded"]["bytes"] / (1 << 20)
    assert cases["offloaded"]["at_rest"]["device"] < 0.2 * cases["on the GPU"]["at_rest"]["device"]
    sharded, gathered = (cases[name]["figures"] for name in ("offloaded", "offloaded, gathered"))
    assert sharded["receiver, host MiB"] < 0.2 * whole < 0.8 * whole < gathered["receiver, host MiB"]
