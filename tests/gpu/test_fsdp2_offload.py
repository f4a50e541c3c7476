"""FSDP2's offloads on a GPU: the same gradients and weights, from less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.trainer.backends import build
from services.trainer.protocol.microbatch import MicroBatch
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_lora import loss
from tests.services.trainer.groups import job_spec

pytestmark = pytest.mark.gpu


def eight_layers(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder: Path, device: torch.device, options: dict[str, Any], recompute: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after two updates of two micro-batches of 16,000 tokens, and the peak of the second update, bytes."""
    trainer = {"activation_recompute": recompute, "backend_options": {"compile_layers": False, **options}}
    backend: Any = build(job_spec(folder, trainer={"token_budget": 32_768, **trainer}), device)
    drawn = samples([(500, 1500)] * 16)
    batches = [MicroBatch.pack(drawn, range(start, start + 8)) for start in (0, 8)]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        backend.forward_backward(batches, loss, temperature=1.0)
        backend.optimizer_step(lr=1e-3, gradient_scale=1.0)
    torch.cuda.synchronize()
    weights = {name: parameter.detach().full_tensor().cpu() for name, parameter in backend._trained.items()}
    return weights, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "options",
    [
        {"offload_activations": True},
        {"offload_optimizer": True},
        {"offload_activations": True, "offload_parameters": True},
    ],
    ids=["activations", "moments", "activations and parameters"],
)
def test_offload_changes_no_weight(
    device: torch.device, tmp_path: Path, options: dict[str, Any], recompute: bool
) -> None:
    """The weights agree within what two orders of summation on a GPU give, and offloaded activations free memory."""
    folder = eight_layers(tmp_path / "model")
    expected, most = run(folder, device, {}, recompute)
    found, less = run(folder, device, options, recompute)
    for name, values in expected.items():
        assert (found[name] - values).abs().mean() < 1e-5, name
    if "offload_activations" in options:
        assert less < (1.0 if recompute else 0.9) * most
