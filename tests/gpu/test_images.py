"""Prompts with images on a GPU, in bfloat16 with Transformer Engine: Megatron's rotary positions by time, height and
width, and the tower's features in the places of embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.backends import build
from services.trainer.backends.tower import Images
from services.trainer.protocol.microbatch import MicroBatch
from tests.image_models import save_image_model
from tests.services.trainer.backends.fsdp2.test_images import DATA, alone, drawn
from tests.services.trainer.groups import job_spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_megatron_computes_what_each_sequence_is_alone(
    kind: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers in float32 on the CPU. With the positions of text it would be much further away, and without
    what the tower of Qwen3-VL adds after the first layers."""
    pytest.importorskip("transformer_engine")
    folder = save_image_model(tmp_path / "model", kind=kind)
    samples = drawn(folder)
    expected = torch.cat(alone(folder, samples)[0])
    trainer = {"backend": "megatron", "dtype": "bfloat16", "token_budget": 2048}
    backend: Any = build(job_spec(folder, data=DATA, trainer=trainer), device)
    batch = MicroBatch.pack(samples, range(len(samples)))

    def apart() -> float:
        (found,) = backend.logprobs([batch], temperature=1.0)
        return float((found.cpu() - expected).abs().mean())

    near = apart()
    monkeypatch.setattr(Images, "positions", lambda self, parts: batch.positions_p.expand(4, -1))
    far = apart()
    print(f"{kind}: mean {near:.1e}, with the positions of text {far:.1e}")
    assert near < 0.05 and far > 5 * near
    if kind == "qwen3_vl":
        monkeypatch.undo()
        whole = backend._tower.features
        monkeypatch.setattr(backend._tower, "features", lambda batch: whole(batch)[:1])
        without = apart()
        print(f"{kind}: without features of layers {without:.1e}")
        assert without > 5 * near
