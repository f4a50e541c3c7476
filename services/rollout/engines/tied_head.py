"""Whether the output layer of a pool's model is the one that its config promises, whatever engine loads it."""

import json
from pathlib import Path
from typing import Any

from millrace.spec.pool import PoolTask
from millrace.weights.headers import INDEX, SINGLE, stored_shapes
from millrace.weights.unread import other_values
from services.rollout.engine import PoolModel

EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
ROWS = 4096
"""Rows that are compared at a time."""


def check_tied_head(model: PoolModel) -> None:
    """Raises InvalidJob where the config ties the output layer to the embedding and the folder stores another one:
    vLLM computes with the embedding then, transformers with the stored layer."""
    from transformers import AutoConfig

    folder = Path(model.pool.path)
    shapes = {} if model.task is PoolTask.REWARDS else stored_shapes(folder)
    heads = [name for name in shapes if name.split(".")[-2:] == ["lm_head", "weight"]]
    embeddings = [name for name in shapes if name.endswith(EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.pool.trust_remote_code)
    if not config.tie_word_embeddings:
        return
    (head,), (embedding,) = heads, embeddings
    if shapes[head] != shapes[embedding] or not _equal(folder, head, embedding, shapes[head][0]):
        raise other_values(f"{model.field}.path: {folder}", head, embedding)


def _equal(folder: Path, one: str, other: str, rows: int) -> bool:
    import torch
    from safetensors import safe_open

    index = folder / INDEX
    file_of: dict[str, Any] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    paths = [folder / file_of.get(name, SINGLE) for name in (one, other)]
    with safe_open(paths[0], framework="pt") as first, safe_open(paths[1], framework="pt") as second:
        a, b = first.get_slice(one), second.get_slice(other)
        return all(torch.equal(a[at : at + ROWS], b[at : at + ROWS]) for at in range(0, rows, ROWS))
