"""The language models of Qwen2.5-VL, a Qwen2, and of dense Qwen3-VL, a Qwen3: for text the three axes of positions are
equal. The tower is not built, trained or published: engines keep the one that they loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.megatron.architectures import qwen2, qwen3
from millrace.megatron.architectures.shape import ModelShape, Names
from millrace.sequence_cost import text_entries
from millrace.towers import deepstack_layers

NAMES = Names(module="model.language_model.", untrained=(r"^(model\.)?visual\.",))


def shape(config: Mapping[str, Any]) -> ModelShape:
    text = text_entries(config)
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    if config["model_type"] == "qwen2_5_vl":
        return of_qwen2(qwen2.shape(text, theta=1e6))
    return of_qwen3(qwen3.shape(text, theta=5e5), config.get("vision_config") or {})


def of_qwen2(decoder: ModelShape) -> ModelShape:
    """The shape of a Qwen2.5-VL with this language model, without its tower."""
    return replace(decoder, architecture="qwen2_5_vl", names=NAMES)


def of_qwen3(decoder: ModelShape, vision: Mapping[str, Any]) -> ModelShape:
    """The shape of a Qwen3-VL with this language model, without its tower. `vision`: entries of its `vision_config`."""
    rope, layers = replace(decoder.rope, interleaved=True), deepstack_layers(vision)
    return replace(decoder, architecture="qwen3_vl", rope=rope, names=NAMES, deepstack_layers=layers)
