"""Models with GatedDeltaNet layers on a GPU, with the kernels of flash-linear-attention."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.backends import build, recurrence
from services.trainer.backends.fsdp2 import recurrent
from services.trainer.protocol.microbatch import MicroBatch
from tests.hybrid_models import save_hybrid_model
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_recurrent import LENGTHS, alone, one_pass
from tests.services.trainer.groups import job_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec(recurrence.KERNELS) is None, reason="needs flash-linear-attention"),
]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The distance of the whole gradients, as a share of the norm."""
    both = [(found[name].cpu().float().flatten(), each.flatten()) for name, each in expected.items()]
    whole, wanted = (torch.cat(parts) for parts in zip(*both, strict=True))
    return float((whole - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"])
def test_the_kernels_compute_what_torch_does(device: torch.device, tmp_path: Path, kind: str) -> None:
    """Packed sequences in the kernels against each alone on the CPU in float32. The kernels round products to 10 bits,
    so their bound is not that of the CPU; the same layers in plain torch on the GPU are held to that."""
    folder, drawn = save_hybrid_model(tmp_path / kind, kind), samples(LENGTHS)
    with recurrent.in_torch(AutoModelForCausalLM.from_pretrained(folder)):
        expected, gradients = alone(folder, drawn)
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    for name, bound in (("kernels", 0.03), ("torch", 1e-4)):
        options = {"backend_options": {"compile_layers": False}}
        backend: Any = build(job_spec(folder, trainer=options), device)
        with recurrent.in_torch(backend._model) if name == "torch" else nullcontext():
            logprobs, found = one_pass(backend, batch)
        apart = (logprobs.cpu() - expected).abs()
        print(f"{kind} {name}: mean {float(apart.mean()):.1e}, most {float(apart.max()):.1e}", end=", ")
        print(f"gradient {distance(found, gradients):.1e}")
        assert float(apart.max()) < bound
        assert distance(found, gradients) < bound
