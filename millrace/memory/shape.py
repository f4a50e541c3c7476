"""The shape of any decoder, as far as memory depends on it.

The architectures that the megatron backend builds are read exactly. Of others the entries that nearly all configs have
are read: what such a model has besides (norms, biases) is not counted. Of towers for images those are counted that take
the images of prompts.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.data.pictures import MODELS, PROCESSOR, WHOLE
from millrace.errors import InvalidJob
from millrace.megatron.architectures import ARCHITECTURES, read_shape
from millrace.megatron.architectures.reading import recurrence
from millrace.megatron.architectures.shape import ExpertShape, ModelShape, Rope
from millrace.sequence_cost import text_entries
from millrace.towers import TowerShape

FIELD = "model.path"
GATED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types (of the text part) whose attention has a gate of its output."""
OUTER = "model.language_model."
"""The names of the decoder's layers begin so in a model with a tower."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk")
SHARED = ("shared_expert_intermediate_size",)
WIDTH = ("moe_intermediate_size", "intermediate_size")


def decoder_shape(folder: Path, field: str = FIELD) -> ModelShape:
    """The shape of the model in `folder`. Raises InvalidJob if its config.json is missing or does not say its
    sizes."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        fix = "give a Hugging Face model folder that this machine sees at this path."
        raise InvalidJob(f"{field}: {path} cannot be read: {error}.", fix) from error
    try:
        if config.get("model_type") in ARCHITECTURES:
            with suppress(InvalidJob):  # a model that only the other backend builds
                return replace(read_shape(folder, field), tower=_tower(config, folder))
        return _with_tower(_sizes(text_entries(config)), config, folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fix = "complete the config; the prediction needs it."
        raise InvalidJob(f"{field}: {path} does not say the model's sizes: {error}.", fix) from error


def _sizes(config: Mapping[str, Any]) -> ModelShape:
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    hidden = int(config["hidden_size"])
    experts = _first(config, EXPERTS)
    return ModelShape(
        architecture=str(config.get("model_type")),
        layers=layers,
        hidden=hidden,
        ffn=int(config.get("intermediate_size") or 4 * hidden),
        heads=heads,
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        context=int(config.get("max_position_embeddings") or 0),
        norm_epsilon=1e-6,
        rope=Rope(10_000.0),
        tied=bool(config.get("tie_word_embeddings", False)),
        gated=config.get("model_type") in GATED,
        recurrence=recurrence(config),
        experts=None
        if not experts
        else ExpertShape(
            experts,
            _first(config, CHOSEN) or 1,
            _first(config, WIDTH) or hidden,
            (True,) * layers,
            _first(config, SHARED),
        ),
    )


def _with_tower(decoder: ModelShape, config: Mapping[str, Any], folder: Path) -> ModelShape:
    """The model whose decoder is known, with its tower. In a whole model layers have other names, and that says
    whether its head is tied."""
    if config.get("model_type") not in WHOLE:
        return replace(decoder, tower=_tower(config, folder))
    names, tied = replace(decoder.names, module=OUTER), bool(config.get("tie_word_embeddings", False))
    return replace(decoder, names=names, tied=tied, tower=_tower(config, folder))


def _tower(config: Mapping[str, Any], folder: Path) -> TowerShape | None:
    """The tower; None if prompts for the model cannot have images."""
    if config.get("model_type") not in MODELS or not config.get("vision_config"):
        return None
    processor: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a folder for text has none
        processor = json.loads((folder / PROCESSOR).read_bytes())
    return TowerShape.of_config({"model_type": config["model_type"], **config["vision_config"]}, processor)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(value) for name in names if (value := config.get(name))), None)
