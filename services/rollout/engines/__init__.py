"""The engines by name. A new one is one file here and one line in ENGINES, and its name in `millrace.spec.rollout`."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from millrace.errors import NotFound
from services.rollout.engine import Engine, Probe

ENGINES: Mapping[str, tuple[str, str]] = {
    "vllm": ("services.rollout.engines.vllm.engine", "VllmEngine"),
    "sglang": ("services.rollout.engines.sglang.engine", "SglangEngine"),
    "transformers": ("services.rollout.engines.transformers.engine", "TransformersEngine"),
}
"""Module and class. The module also has `probe() -> Probe`. Importing it imports no engine library."""


def probe(name: str) -> Probe:
    """Whether engine `name` would run here; imports no engine library. Raises NotFound for an unknown name."""
    return cast(Callable[[], Probe], import_module(_entry(name)[0]).probe)()


def create(name: str) -> Engine:
    """An engine that is not started yet. Raises NotFound for an unknown name."""
    module, kind = _entry(name)
    return cast(Engine, getattr(import_module(module), kind)())


def _entry(name: str) -> tuple[str, str]:
    if name not in ENGINES:
        raise NotFound(f"there is no engine {name!r}.", f"choose one of {', '.join(ENGINES)}.")
    return ENGINES[name]
