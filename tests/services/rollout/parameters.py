"""An engine's weights read back by value, in Hugging Face terms, without the code under test."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from services.rollout.engine import Engine

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 32, 96


async def engine_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    if engine.name == "transformers":
        return {name: p.detach().cpu().clone() for name, p in engine._model.named_parameters()}  # type: ignore[attr-defined]
    if engine.name == "sglang":
        return await asyncio.to_thread(_saved, engine._engine)  # type: ignore[attr-defined]
    (raw,) = await engine._llm.collective_rpc(_read)  # type: ignore[attr-defined]
    held: dict[str, torch.Tensor] = {}
    for name, (shape, dtype, data) in raw.items():
        held |= _unfused(name, torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape))
    return held


def _saved(sglang: Any) -> dict[str, torch.Tensor]:
    """As SGLang itself writes its parameters to a folder."""
    held: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        sglang.save_sharded_model(path=folder, pattern=None, max_size=None)
        for part in Path(folder).glob("*.safetensors"):
            for name, tensor in load_file(part).items():
                held |= _unfused(name, tensor.clone())
    return held


def _read(worker: Any) -> dict[str, tuple[list[int], str, bytes]]:
    """Runs inside vLLM's worker."""
    held = {}
    for name, parameter in worker.get_model().named_parameters():
        data = parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        held[name] = (list(parameter.shape), str(parameter.dtype).removeprefix("torch."), data)
    return held


def _unfused(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if "qkv_proj" in name:
        parts = tensor.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        return {name.replace("qkv_proj", p): t for p, t in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True)}
    if "gate_up_proj" in name:
        parts = tensor.split([INTERMEDIATE, INTERMEDIATE])
        return {name.replace("gate_up_proj", p): t for p, t in zip(("gate_proj", "up_proj"), parts, strict=True)}
    if "embed_tokens" in name or "lm_head" in name:
        return {name: tensor[:259]}  # vLLM pads the vocabulary
    return {name: tensor}
