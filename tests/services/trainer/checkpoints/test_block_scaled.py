"""FP8 tensors with one factor a block, by every reader of model folders, against a dequantization by elements."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from millrace.errors import InvalidJob
from services.trainer.backends import build
from services.trainer.checkpoints import exported
from services.trainer.checkpoints.model_files import ModelFiles, stored_head
from services.trainer.protocol.microbatch import MicroBatch
from tests.fp8 import dequantized, quantized, save_quantized
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.checkpoints.saved import save
from tests.services.trainer.groups import job_spec

SHAPE = (37, 29)
SIZES = [(8, 8), (16, 4), (37, 29), (1, 1), (128, 128), (5, 30)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Block size → folder with one random tensor, `w`, whose last blocks are smaller, and a bfloat16 one, `b`."""
    torch.manual_seed(0)
    weight = torch.randn(SHAPE) * torch.logspace(-3, 3, SHAPE[1])
    found = {}
    for block in SIZES:
        folder = found[block] = tmp_path_factory.mktemp("blocks")
        values, scales = quantized(weight, block)
        tensors = {"w": values, "w_scale_inv": scales, "b": torch.ones(3, dtype=torch.bfloat16)}
        save_file(tensors, folder / "model.safetensors")
        write_config(folder, weight_block_size=list(block))
    return found


def write_config(folder: Path, **changes: object) -> None:
    method = {"quant_method": "fp8", "fmt": "e4m3", **changes}
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": method}))


@pytest.mark.parametrize("block", SIZES)
def test_whole_tensors(folders: dict[tuple[int, int], Path], block: tuple[int, int]) -> None:
    stored = load_file(folders[block] / "model.safetensors")
    with ModelFiles(folders[block]) as files:
        assert list(files) == ["b", "w"] and not files.has("w_scale_inv")
        assert torch.equal(files.whole("w"), dequantized(stored["w"], stored["w_scale_inv"], block))
        assert files.whole("b").dtype == torch.bfloat16
        assert (files.is_quantized("w"), files.is_quantized("b")) == (True, False)


def ranges(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))


@settings(max_examples=200)
@given(block=st.sampled_from(SIZES), rows=ranges(SHAPE[0]), columns=ranges(SHAPE[1]))
def test_boxes_that_begin_anywhere(
    folders: dict[tuple[int, int], Path], block: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    box = (slice(*rows), slice(*columns))
    with ModelFiles(folders[block]) as files:
        stored = files.slice_of("w", SHAPE)
        whole = files.whole("w")
        assert torch.equal(stored[box], whole[box])
        assert torch.equal(stored[box[0]], whole[box[0]])


def test_scales_of_experts_in_one_tensor(tmp_path: Path) -> None:
    torch.manual_seed(1)
    parts = [quantized(torch.randn(10, 7), (4, 4)) for _ in range(3)]
    values, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    write_config(tmp_path, weight_block_size=[4, 4])
    with ModelFiles(tmp_path) as files:
        found = files.slice_of("w", (3, 10, 7))[1:3, 3:9, 2:6]
    assert torch.equal(found, torch.stack([dequantized(*part, (4, 4))[3:9, 2:6] for part in parts[1:]]))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    values, scales = quantized(torch.randn(10, 7), (4, 4))

    def failure(tensors: dict[str, torch.Tensor], **changes: object) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        write_config(tmp_path, **changes)
        with pytest.raises(InvalidJob) as found, ModelFiles(tmp_path) as files:
            files.check()
        assert found.value.fix
        return found.value.what

    small = {"weight_block_size": [4, 4]}
    assert "w in" in failure({"w": values}, **small)
    told = failure({"w": values, "w_scale_inv": scales[:1].clone()}, **small)
    assert "(1, 2) for blocks of 4 × 4, not (3, 2)" in told
    assert "F8_E5M2" in failure({"w": values.float().to(torch.float8_e5m2), "w_scale_inv": scales}, **small)
    assert "without blocks" in failure({"w": values, "w_scale_inv": scales})
    assert "gptq" in failure({"w": values}, quant_method="gptq")


KINDS = ("qwen3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind → FP8 folder, and the folder with the same weights in float32."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for kind in KINDS:
        tiny.save(kind, root / kind)
        found[kind] = root / f"{kind}-fp8", root / f"{kind}-plain"
        save_quantized(root / kind, *found[kind])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_trains_what_the_weights_stand_for(
    kind: str, models: dict[str, tuple[Path, Path]], one_rank: torch.device
) -> None:
    """Policy, reference and critic, and the first update's gradient."""
    batch, answers = MicroBatch.pack(samples([(4, 9), (8, 3)]), [0, 1]), []
    for folder in models[kind]:
        algorithm = {"kl": {"name": "k3"}, "advantage": {"name": "gae"}, "critic": {}}
        backend = build(job_spec(folder, algorithm=algorithm), one_rank)
        assert backend.critic is not None
        (logprobs_r,) = backend.logprobs([batch], temperature=1.0)
        (reference_r,) = backend.logprobs([batch], temperature=1.0, reference=True)
        (values_r,) = backend.critic.values([batch])
        backend.forward_backward([batch], lambda _, scores: (scores.logprobs_r.sum(), None), temperature=1.0)
        exported = [*backend.critic.export("float32"), *backend.export("float32")]
        weights = {info.name: tensor for info, tensor in exported if tensor is not None}
        answers.append((logprobs_r, reference_r, values_r, backend.gradient_norm(), weights))
    quantized, plain = answers
    for found, expected in zip(quantized[:3], plain[:3], strict=True):
        assert torch.equal(found, expected)
    assert quantized[3] == plain[3]
    assert quantized[4].keys() == plain[4].keys()
    assert all(torch.equal(tensor, plain[4][name]) for name, tensor in quantized[4].items())


def test_what_is_written_is_unquantized(
    models: dict[str, tuple[Path, Path]], one_rank: torch.device, tmp_path: Path
) -> None:
    quantized, plain = models["deepseek_v3"]
    backend = build(job_spec(quantized), one_rank)
    save(tmp_path / "saved", backend, 1, huggingface_from=quantized)
    exported.write(tmp_path / "saved", tmp_path / "exported", quantized)
    expected = load_file(plain / "model.safetensors")
    for folder in (tmp_path / "saved" / "huggingface", tmp_path / "exported"):
        assert json.loads((folder / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
        written = load_file(folder / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


def test_a_head_is_read_like_any_other_tensor(tmp_path: Path) -> None:
    values, scales = quantized(torch.randn(1, 30), (8, 8))
    save_file({"score.weight": values, "score.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    write_config(tmp_path, weight_block_size=[8, 8])
    found = stored_head(tmp_path, 30)
    assert found is not None and torch.equal(found, dequantized(values, scales, (8, 8)))
