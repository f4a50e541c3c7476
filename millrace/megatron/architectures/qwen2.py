"""Qwen2 and Qwen2.5: biases on query, key and value."""

from collections.abc import Mapping
from typing import Any

from millrace.megatron.architectures.reading import THETA, refuse_unless, sizes
from millrace.megatron.architectures.shape import ModelShape


def shape(config: Mapping[str, Any], theta: float = THETA) -> ModelShape:
    refuse_unless(config, "use_sliding_window", False)
    return ModelShape(architecture="qwen2", attention_bias=True, **sizes(config, theta))
