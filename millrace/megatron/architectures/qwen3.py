"""Qwen3: norms on each query and key head."""

from collections.abc import Mapping
from typing import Any

from millrace.megatron.architectures.reading import THETA, refuse_unless, sizes
from millrace.megatron.architectures.shape import ModelShape


def shape(config: Mapping[str, Any], theta: float = THETA) -> ModelShape:
    refuse_unless(config, "use_sliding_window", False)
    refuse_unless(config, "attention_bias", False)
    common = sizes(config, theta) | {"head_dim": config["head_dim"]}
    return ModelShape(architecture="qwen3", query_key_norm=True, **common)
