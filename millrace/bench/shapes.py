"""Shapes of published models, and small ones, for benchmarks with random weights."""

from millrace.errors import InvalidJob
from millrace.megatron.architectures.shape import ExpertShape, LatentAttention, ModelShape, Rope

ROPE = Rope(theta=1e6)


PUBLISHED = (128, 151936, 40960)
"""Size of a head, of the vocabulary, and of the context."""
SMALL = (64, 1024, 512)
"""Sizes as small as the kernels of engines on GPUs allow."""
TINY = (32, 259, 512)


def _qwen3(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    key_value_heads: int,
    *,
    tied: bool = False,
    experts: tuple[int, int, int] | None = None,
    sizes: tuple[int, int, int] = PUBLISHED,
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


SHAPES: dict[str, ModelShape] = {
    "tiny": _qwen3(2, 64, 96, 4, 2, tied=True, sizes=TINY),
    "tiny-moe": _qwen3(2, 64, 96, 4, 2, experts=(8, 2, 32), sizes=TINY),
    "small": _qwen3(2, 256, 512, 4, 2, tied=True, sizes=SMALL),
    "small-moe": _qwen3(2, 256, 512, 4, 2, experts=(8, 2, 128), sizes=SMALL),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, experts=(128, 8, 768)),
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
