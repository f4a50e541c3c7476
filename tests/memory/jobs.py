"""Jobs for which memory is predicted."""

from dataclasses import replace
from typing import Any

from millrace.megatron.architectures.published import shape_of
from millrace.megatron.architectures.shape import ModelShape
from millrace.spec import JobSpec, parse


def job(backend: str = "fsdp2", options: dict[str, Any] | None = None, **parts: Any) -> JobSpec:
    """A job with these backend options; `parts` are fields of `trainer`, and `lora`, `algorithm` and `rollout`."""
    tree = {
        "name": "memory",
        "output": "/output",
        "model": {"path": "/model", "lora": parts.pop("lora", None)},
        "data": {"procedural": "reasoning_gym:spell_backward"},
        "algorithm": parts.pop("algorithm", {}),
        "rollout": {"max_response_tokens": 1024, **parts.pop("rollout", {})},
        "trainer": {"backend": backend, "backend_options": options or {}, **parts},
    }
    return parse(tree)


def cut(name: str, layers: int, vocabulary: int | None = None) -> ModelShape:
    """A published shape with fewer layers, and with a head of its own."""
    shape = shape_of(name)
    experts = shape.experts and replace(shape.experts, layers=(True,) * layers)
    vocabulary = vocabulary or shape.vocabulary
    return replace(shape, layers=layers, experts=experts, vocabulary=vocabulary, tied=False)
