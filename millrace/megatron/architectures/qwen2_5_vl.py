"""Qwen2.5-VL, the text path: a Qwen2 whose three position axes are the same for text. The vision tower is neither
built nor trained nor published: engines keep the one they loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.megatron.architectures import qwen2
from millrace.megatron.architectures.shape import ModelShape


def shape(config: Mapping[str, Any]) -> ModelShape:
    text = {**config, **(config.get("text_config") or {})}
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    return replace(qwen2.shape(text), architecture="qwen2_5_vl")
