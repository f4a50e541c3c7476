"""Shapes of published models, by the sizes in their config.json on the Hugging Face hub, and small ones for benchmarks.
Torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from millrace.errors import InvalidJob
from millrace.megatron.architectures import qwen_vl
from millrace.megatron.architectures.shape import ExpertShape, LatentAttention, ModelShape, Rope
from millrace.towers import TowerShape

ROPE = Rope(theta=1e6)
QWEN3 = (128, 151936, 40960)
"""Size of a head, of the vocabulary, and of the context."""
QWEN2_5 = (128, 152064, 32768)
SMALL = (64, 1024, 512)
"""Sizes as small as the kernels of engines on GPUs allow: of a head, of the vocabulary, and of the context."""
TINY = (32, 259, 512)


def qwen3(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    key_value_heads: int,
    *,
    tied: bool = False,
    experts: tuple[int, int, int] | None = None,
    sizes: tuple[int, int, int] = QWEN3,
) -> ModelShape:
    """A Qwen3 model, or Qwen3-MoE with `experts` (number, number for each token, width) in every layer."""
    return ModelShape(
        "qwen3_moe" if experts else "qwen3",
        layers,
        hidden,
        ffn,
        heads,
        key_value_heads,
        *sizes,
        1e-6,
        ROPE,
        tied,
        query_key_norm=True,
        experts=ExpertShape(*experts, (True,) * layers) if experts else None,
    )


def qwen2_5(layers: int, hidden: int, ffn: int, heads: int, key_value_heads: int) -> ModelShape:
    """A Qwen2.5 model with an output head of its own."""
    sizes = (layers, hidden, ffn, heads, key_value_heads, *QWEN2_5)
    return ModelShape("qwen2", *sizes, 1e-6, ROPE, tied=False, attention_bias=True)


QWEN2_5_VL_TOWER = {"hidden_size": 1280, "out_hidden_size": 3584}
"""Entries of the `vision_config` of Qwen2.5-VL-7B that are not transformers' own."""
QWEN2_5_VL_SECTIONS = (16, 24, 24)
"""Frequencies of a head that turn by time, height and width."""
QWEN2_5_VL_MOST_PIXELS = 12845056
"""The most pixels of one image, by the processor's file of Qwen2.5-VL."""


QWEN3_VL_SECTIONS = (24, 20, 20)
"""The same of Qwen3-VL, where these frequencies take turns."""
QWEN3_VL_MOST_PIXELS = 16777216
"""The most pixels of one image, by the processor's file of Qwen3-VL."""
QWEN3_VL_SMALL_TOWER: Mapping[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": (5, 11, 17),
}
"""Entries of the `vision_config` of Qwen3-VL-2B and 4B that are not transformers' own."""


def qwen2_5_with_tower(decoder: ModelShape, context: int) -> ModelShape:
    """A Qwen2.5-VL with this language model."""
    tower = TowerShape.of_config(QWEN2_5_VL_TOWER, {"max_pixels": QWEN2_5_VL_MOST_PIXELS})
    rope = replace(decoder.rope, sections=QWEN2_5_VL_SECTIONS)
    return replace(qwen_vl.of_qwen2(decoder), context=context, rope=rope, tower=tower)


def qwen3_with_tower(decoder: ModelShape, vision: Mapping[str, Any] = MappingProxyType({})) -> ModelShape:
    """A Qwen3-VL with this language model. `vision`: entries of its `vision_config`."""
    whole = {"model_type": "qwen3_vl", "out_hidden_size": decoder.hidden, **vision}
    tower = TowerShape.of_config(whole, {"size": {"longest_edge": QWEN3_VL_MOST_PIXELS}})
    rope = Rope(theta=5e6, sections=QWEN3_VL_SECTIONS)
    return replace(qwen_vl.of_qwen3(replace(decoder, rope=rope), whole), context=262144, tower=tower)


PUBLISHED: dict[str, ModelShape] = {
    "qwen3-0.6b": qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": qwen3(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": qwen3(36, 4096, 12288, 32, 8),
    "qwen3-14b": qwen3(40, 5120, 17408, 40, 8),
    "qwen3-32b": qwen3(64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": qwen3(48, 2048, 6144, 32, 4, experts=(128, 8, 768)),
    "qwen3-235b-a22b": qwen3(94, 4096, 12288, 64, 4, experts=(128, 8, 1536)),
    "qwen2.5-7b": qwen2_5(28, 3584, 18944, 28, 4),
    "qwen2.5-vl-7b": qwen2_5_with_tower(qwen2_5(28, 3584, 18944, 28, 4), 128000),
    "qwen3-vl-2b": qwen3_with_tower(qwen3(28, 2048, 6144, 16, 8, tied=True), QWEN3_VL_SMALL_TOWER),
    "qwen3-vl-4b": qwen3_with_tower(qwen3(36, 2560, 9728, 32, 8, tied=True), QWEN3_VL_SMALL_TOWER),
    "qwen3-vl-8b": qwen3_with_tower(qwen3(36, 4096, 12288, 32, 8)),
    "qwen2.5-32b": qwen2_5(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": qwen2_5(80, 8192, 29568, 64, 8),
    "deepseek-v3": ModelShape(
        "deepseek_v3",
        61,
        7168,
        18432,
        128,
        128,
        192,
        129280,
        163840,
        1e-6,
        ROPE,
        False,
        latent=LatentAttention(1536, 512, 128, 64, 128),
        experts=ExpertShape(256, 8, 2048, tuple(layer >= 3 for layer in range(61)), shared_ffn=2048, bias=True),
    ),
}
"""Every shape by its model's name in small letters."""
UNMADE = ("qwen2", "qwen2_5_vl", "qwen3_vl")
"""Architectures of which benchmarks make no model folder."""
SHAPES: dict[str, ModelShape] = {
    "tiny": qwen3(2, 64, 96, 4, 2, tied=True, sizes=TINY),
    "tiny-moe": qwen3(2, 64, 96, 4, 2, experts=(8, 2, 32), sizes=TINY),
    "small": qwen3(2, 256, 512, 4, 2, tied=True, sizes=SMALL),
    "small-moe": qwen3(2, 256, 512, 4, 2, experts=(8, 2, 128), sizes=SMALL),
    **{name: shape for name, shape in PUBLISHED.items() if shape.architecture not in UNMADE},
}
"""The shapes of which benchmarks can make a model folder (`benchmarks/shapes.py`)."""


def published_as(folder_name: str) -> str | None:
    """The published model that a folder of this name holds: the longest known name that it begins with, or None."""
    lowered = folder_name.lower()
    return max((name for name in PUBLISHED if lowered.startswith(name)), key=len, default=None)


def shape_of(name: str) -> ModelShape:
    if name not in SHAPES:
        raise InvalidJob(f"there is no shape {name!r}.", f"choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
