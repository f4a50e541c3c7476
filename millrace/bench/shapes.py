"""Shapes of published models, and small ones, for benchmarks with random weights."""

from millrace.errors import InvalidJob
from millrace.megatron.architectures.published import PUBLISHED, qwen3
from millrace.megatron.architectures.shape import ModelShape

SMALL = (64, 1024, 512)
"""Sizes as small as the kernels of engines on GPUs allow: of a head, of the vocabulary, and of the context."""
TINY = (32, 259, 512)

SHAPES: dict[str, ModelShape] = {
    "tiny": qwen3(2, 64, 96, 4, 2, tied=True, sizes=TINY),
    "tiny-moe": qwen3(2, 64, 96, 4, 2, experts=(8, 2, 32), sizes=TINY),
    "small": qwen3(2, 256, 512, 4, 2, tied=True, sizes=SMALL),
    "small-moe": qwen3(2, 256, 512, 4, 2, experts=(8, 2, 128), sizes=SMALL),
    **{name: shape for name, shape in PUBLISHED.items() if shape.architecture != "qwen2"},
}
"""The shapes of which benchmarks can make a model folder (`benchmarks/shapes.py`)."""


def shape_of(name: str) -> ModelShape:
    if name not in SHAPES:
        raise InvalidJob(f"there is no shape {name!r}.", f"choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
