"""Shapes of published models, for weights of no meaning."""

from millrace.errors import InvalidJob
from millrace.megatron.shape import ExpertShape, LatentAttention, ModelShape, Rope

ROPE = Rope(theta=1e6)


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, key_value_heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        "qwen3", layers, hidden, ffn, heads, key_value_heads, 128, 151936, 40960, 1e-6, ROPE, tied, query_key_norm=True
    )


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape("qwen3", 2, 64, 96, 4, 2, 32, 259, 512, 1e-6, ROPE, True, query_key_norm=True),
    "tiny-moe": ModelShape(
        "qwen3_moe",
        2,
        64,
        96,
        4,
        2,
        32,
        259,
        512,
        1e-6,
        ROPE,
        False,
        query_key_norm=True,
        experts=ExpertShape(8, 2, 32, (True, True)),
    ),
    # As small as the kernels of engines on GPUs allow.
    "small": ModelShape("qwen3", 2, 256, 512, 4, 2, 64, 1024, 512, 1e-6, ROPE, True, query_key_norm=True),
    "small-moe": ModelShape(
        "qwen3_moe",
        2,
        256,
        512,
        4,
        2,
        64,
        1024,
        512,
        1e-6,
        ROPE,
        False,
        query_key_norm=True,
        experts=ExpertShape(8, 2, 128, (True, True)),
    ),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, tied=False),
    "qwen3-30b-a3b": ModelShape(
        "qwen3_moe",
        48,
        2048,
        6144,
        32,
        4,
        128,
        151936,
        40960,
        1e-6,
        ROPE,
        False,
        query_key_norm=True,
        experts=ExpertShape(128, 8, 768, (True,) * 48),
    ),
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


def shape_of(name: str) -> ModelShape:
    if name not in SHAPES:
        raise InvalidJob(f"there is no shape {name!r}.", f"choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
