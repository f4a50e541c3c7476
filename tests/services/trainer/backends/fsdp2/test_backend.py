"""The fsdp2 backend on one rank: packing, recompute, export, what it refuses."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from millrace.errors import InvalidJob
from millrace.weights.transfer.checksum import checksum
from services.trainer.backends import build
from services.trainer.backends.fsdp2.attention import attend
from services.trainer.backends.recurrence import Segments
from services.trainer.protocol.microbatch import MicroBatch, Sample
from tests.services.trainer.groups import job_spec


def samples(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [
        Sample(
            f"sample {i}",
            random.integers(0, 256, prompt).astype(np.int32),
            random.integers(0, 256, response).astype(np.int32),
            np.zeros(response, np.float32),
            0.0,
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


def padded_logprobs(folder: Path, drawn: list[Sample], temperature: float) -> torch.Tensor:
    """Each sequence alone through transformers, without packing."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    values = []
    with torch.no_grad():
        for sample in drawn:
            tokens = torch.tensor(np.concatenate([sample.prompt, sample.response])).long()
            logits = model(input_ids=tokens[None]).logits[0].double() / temperature
            logprobs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
            values.append(logprobs[len(logprobs) - len(sample.response) :])
    return torch.cat(values)


@pytest.mark.parametrize("attention", ["segments", "sdpa"])
def test_packed_equals_unpacked(one_rank: torch.device, untied_model: Path, attention: str) -> None:
    lengths = [(3, 5), (20, 1), (1, 90), (7, 70), (2, 0), (11, 64), (5, 5)]
    drawn = samples(lengths)
    spec = job_spec(untied_model, trainer={"backend_options": {"attention": attention}})
    backend = build(spec, one_rank)
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    (logprobs_r,) = backend.logprobs([batch], temperature=0.7)
    expected_r = padded_logprobs(untied_model, drawn, 0.7)
    torch.testing.assert_close(logprobs_r.double(), expected_r, atol=2e-5, rtol=1e-5)


def test_sliding_window_reaches_no_further() -> None:
    torch.manual_seed(0)
    lengths = [5, 9, 2]
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
    segments = Segments.of(lengths, torch.device("cpu"))
    out, _ = attend(torch.nn.Module(), query, key, value, None, segments=segments, sliding_window=3)
    start = 0
    for length in lengths:
        for at in range(length):
            first = max(0, at - 2)
            for head in range(4):
                keys, values = (t[0, head // 2, start + first : start + at + 1] for t in (key, value))
                weights = (keys @ query[0, head, start + at] / 8**0.5).softmax(0)
                torch.testing.assert_close(out[0, start + at, head], weights @ values, atol=1e-5, rtol=1e-5)
        start += length


def test_recompute_changes_no_gradient(one_rank: torch.device, tied_model: Path) -> None:
    drawn = samples([(4, 9), (8, 3)])
    batch = MicroBatch.pack(drawn, [0, 1])
    norms = []
    for recompute in (False, True):
        backend = build(job_spec(tied_model, trainer={"activation_recompute": recompute}), one_rank)
        backend.forward_backward([batch], lambda _, scores: (scores.logprobs_r.sum(), None), temperature=1.0)
        norms.append(backend.gradient_norm())
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_bfloat16_is_near_float32(one_rank: torch.device, tied_model: Path) -> None:
    """Forward and backward in bfloat16; the gradients, and so the norm, in float32."""
    batch = MicroBatch.pack(samples([(4, 9), (8, 3), (2, 30)]), [0, 1, 2])
    norms, values = [], []
    for dtype in ("float32", "bfloat16"):
        backend = build(job_spec(tied_model, trainer={"dtype": dtype}), one_rank)
        values.append(backend.logprobs([batch], temperature=1.0)[0])
        backend.forward_backward([batch], lambda _, scores: (scores.logprobs_r.mean(), None), temperature=1.0)
        norms.append(backend.gradient_norm())
    assert norms[0] != norms[1]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    torch.testing.assert_close(values[1], values[0], atol=0.05, rtol=0.02)


def test_padding_adds_nothing(one_rank: torch.device, tied_model: Path) -> None:
    backend = build(job_spec(tied_model), one_rank)
    empty = MicroBatch.pack([], [])
    outputs = backend.forward_backward([empty], lambda _, s: (s.logprobs_r.sum(), s.logprobs_r.shape), temperature=1.0)
    assert outputs == [(0,)]
    assert backend.gradient_norm() == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_what_save_pretrained_writes(
    one_rank: torch.device, tied_model: Path, untied_model: Path, tmp_path: Path, dtype: str
) -> None:
    for folder in (tied_model, untied_model, moe_model(tmp_path / "moe")):
        backend = build(job_spec(folder), one_rank)
        saved = saved_tensors(folder)
        manifest = backend.manifest(dtype)
        assert sorted(tensor.name for tensor in manifest.tensors) == sorted(saved)
        for expected, (info, tensor) in zip(manifest.tensors, backend.export(dtype), strict=True):
            assert info == expected and tensor is not None
            assert checksum(tensor) == checksum(saved[info.name].to(getattr(torch, dtype)))


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def moe_model(folder: Path) -> Path:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def broken(folder: Path, target: Path, file: str, text: str) -> Path:
    shutil.copytree(folder, target)
    (target / file).write_text(text)
    return target


def test_refuses_what_is_no_model(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    unknown = broken(tied_model, tmp_path / "unknown", "config.json", '{"model_type": "no-such-architecture"}')
    damaged = broken(tied_model, tmp_path / "damaged", "model.safetensors", "not safetensors")
    partial = broken(tied_model, tmp_path / "partial", "note", "")
    save_file({n: t for n, t in saved_tensors(tied_model).items() if "k_norm" not in n}, partial / "model.safetensors")
    for folder, words in (
        (tmp_path / "missing", "no config.json"),
        (unknown, "config"),
        (damaged, "model.safetensors cannot be read"),
        (partial, "lacks 2 of the model's tensors, the first model.layers.0.self_attn.k_norm.weight"),
    ):
        with pytest.raises(InvalidJob, match=r"model\.path") as raised:
            build(job_spec(folder), one_rank)
        assert words in raised.value.what and str(folder) in raised.value.what and raised.value.fix


@pytest.mark.parametrize(
    "options", [{"atention": "sdpa"}, *({"attention": f"flash_attention_{n}"} for n in (2, 4)), {"attention": "varlen"}]
)
def test_refuses_options(one_rank: torch.device, tied_model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"trainer\.backend_options"):
        build(job_spec(tied_model, trainer={"backend_options": options}), one_rank)
