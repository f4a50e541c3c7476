"""Reads a model's shape from its `config.json`: a file for each family, and a line in `ARCHITECTURES` for each model
type. Torch-free."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from millrace.errors import InvalidJob
from millrace.megatron.architectures.shape import ExpertShape, ModelShape

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen2_5_vl": "qwen_vl",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_vl": "qwen_vl",
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "mixtral": "mixtral",
    "deepseek_v3": "deepseek_v3",
}
"""`model_type` of a config → the module here whose `shape(config)` reads it. Moonlight's type is deepseek_v3."""


def read_shape(folder: Path, field: str = "model.path") -> ModelShape:
    """The shape of the model in `folder`. Raises InvalidJob about `field` if there is no config, or one that the
    megatron backend cannot build."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        fix = "give a Hugging Face model folder that the trainer sees at this path."
        raise InvalidJob(f"{field}: {path} cannot be read: {error}.", fix) from error
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise InvalidJob(
            f"{field}: {folder} is of architecture {kind!r}, which the megatron backend does not know.",
            f"use trainer.backend fsdp2, or a model of {', '.join(sorted(ARCHITECTURES))}.",
        )
    read: Callable[[Mapping[str, Any]], ModelShape] = import_module(f"{__name__}.{ARCHITECTURES[kind]}").shape
    try:
        shape = read(config)
    except KeyError as error:
        raise InvalidJob(f"{field}: {path} does not say {error}.", "complete the config.") from error
    if shape.experts is not None and (reason := _not_routed(shape.experts)):
        raise InvalidJob(f"{field}: {folder} has {reason}.", "use trainer.backend fsdp2, or another model.")
    return shape


def _not_routed(experts: ExpertShape) -> str:
    """Why megatron-core cannot route to these experts as transformers and the engines do; empty if it can."""
    if not 1 <= experts.per_token <= experts.count:
        return f"{experts.count} experts, of which each token goes to {experts.per_token}"
    if experts.per_token == 1 and experts.normalised:
        return (
            "experts of which each token goes to one, with its weight normalised to 1; megatron-core normalises the "
            "weights of two experts or more"
        )
    groups, chosen = experts.groups or 1, experts.groups_per_token or 1
    if experts.count % groups or chosen > groups:
        return f"{experts.count} experts in {groups} groups, of which {chosen} are chosen"
    return ""
