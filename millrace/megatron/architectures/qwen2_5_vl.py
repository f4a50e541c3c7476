"""Qwen2.5-VL for text only: a Qwen2, since its three position axes are equal for text. The vision tower is not built,
trained or published: engines keep the one that they loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.megatron.architectures import qwen2
from millrace.megatron.architectures.shape import ModelShape
from millrace.sequence_cost import text_entries


def shape(config: Mapping[str, Any]) -> ModelShape:
    text = text_entries(config)
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    return of_decoder(qwen2.shape(text, theta=1e6))


def of_decoder(decoder: ModelShape) -> ModelShape:
    """The shape of a model with this language model, without its tower."""
    names = replace(decoder.names, module="model.language_model.", untrained=(r"^(model\.)?visual\.",))
    return replace(decoder, architecture="qwen2_5_vl", names=names)
