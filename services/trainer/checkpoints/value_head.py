"""The head of a critic in a model folder: a linear layer with one output and no bias, named `score` in transformers."""

from pathlib import Path

import torch
from torch import Tensor

from millrace.errors import refused
from services.trainer.checkpoints.model_files import ModelFiles, readable

FIELD = "algorithm.critic.path"
WEIGHT, BIAS = "score.weight", "score.bias"


def stored_head(folder: Path, hidden: int) -> Tensor | None:
    """The weight of the folder's head, [1, hidden]; None where the folder has no head. Raises InvalidJob where its head
    is not one of a critic."""
    found: dict[str, Tensor] = {}
    if readable(folder):
        with ModelFiles(folder) as files:
            found = {name: files.whole(name) for name in (WEIGHT, BIAS) if files.has(name)}
    weight = found.get(WEIGHT)
    if weight is not None and weight.shape != (1, hidden):
        reason = f"its {WEIGHT} is {tuple(weight.shape)}, not {(1, hidden)}: a critic says one number"
        raise refused(FIELD, str(folder), reason, "give a model with one label, or one without a head.")
    if BIAS in found and bool(torch.count_nonzero(found[BIAS])):
        fix = "give a model whose head has none, or one without a head."
        raise refused(FIELD, str(folder), f"its {BIAS} is not 0, and the critic's head has no bias", fix)
    return weight


def config_changes(architectures: list[str]) -> dict[str, object]:
    """The entries in which the config.json of a critic's folder differs from that of its language model."""
    return {
        "architectures": [name.replace("ForCausalLM", "ForTokenClassification") for name in architectures],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "tie_word_embeddings": False,
    }
