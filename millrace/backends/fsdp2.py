"""FSDP2: torch's fully sharded data parallelism. The backend is in `services/trainer/backends/fsdp2`."""

from collections.abc import Mapping
from math import lcm
from typing import Any, Literal

from pydantic import Field

from millrace.descriptors import BackendDescriptor
from millrace.software import TESTED_TORCH, TESTED_TRANSFORMERS, Software
from millrace.validation import limits
from millrace.validation.fields import StrictModel
from millrace.validation.mistakes import options

OF_EACH_MODEL = ("compile_layers", "fsdp_size", "offload_parameters", "sequence_parallel_size")
"""Options that reference and critic may have other values of."""


class Fsdp2Options(StrictModel):
    """What `trainer.backend_options` may hold for this backend."""

    attention: Literal["auto", "varlen", "segments", "flash_attention_2", "flash_attention_4", "sdpa"] = "auto"
    """auto: flash_attention_4 if flash-attn-4 is installed and has the model's heads on this GPU (Hopper, Blackwell);
    else flash_attention_2 if flash-attn is installed; else varlen (torch's kernel for packed sequences: GPUs,
    bfloat16 or float16); else segments (torch's causal kernels on unpacked sequences). sdpa builds the block-diagonal
    mask of the whole micro-batch: for models whose attention takes no other."""
    compile_layers: bool | None = None
    """Compile each decoder layer with torch.compile, which fuses its norms, rotary embedding and activations. It costs
    half a minute at the first step. null: on GPUs where a C compiler is installed."""
    logprob_chunk_tokens: int = Field(1024, ge=16, le=1 << 20)
    """Tokens whose logits exist at a time."""
    fsdp_size: int | None = Field(None, ge=1, le=limits.MOST_RANKS)
    """Ranks that share one sharded copy of the model (HSDP); every group of so many ranks holds a copy. With the number
    of GPUs of a host, weights are gathered within hosts and only gradients cross them. null: one copy over all
    ranks."""
    sequence_parallel_size: int = Field(1, ge=1, le=limits.MOST_RANKS)
    """Ranks that share each micro-batch (Ulysses, arXiv 2309.14509): each has a slice of its tokens, and in attention a
    share of its heads. Activations of long sequences are divided by it. trainer.token_budget counts the tokens of the
    whole micro-batch. It divides the number of attention heads and the number of ranks; key-value heads may be fewer.
    That of `trainer.reference` and `trainer.critic` divides that of the policy, whose ranks then take turns at the
    micro-batches."""
    offload_parameters: bool = False
    """Keep weights, gradients and optimizer in host memory, of every model unless `trainer.reference` or
    `trainer.critic` says otherwise. Each layer's weights are copied to the GPU when they are needed; the optimizer runs
    on the CPU. A publication packs the weights on the GPU, round by round, straight from host memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory between updates. An update copies a part of them at a time to the GPU
    and back. Without effect with `offload_parameters`, which keeps them there anyway."""
    offload_activations: bool = False
    """Keep what a forward pass saves for its backward pass in host memory: copied there while the next layer is
    computed, and back one layer before it is needed. With `trainer.activation_recompute` these are only the inputs of
    the layers."""


def parse(backend_options: Mapping[str, Any]) -> Fsdp2Options:
    """The checked options. Raises InvalidJob with every mistake."""
    return options(Fsdp2Options, backend_options, "trainer.backend_options")


DESCRIPTOR = BackendDescriptor(
    software=Software(
        title="FSDP2",
        distributions=("torch",),
        imports=("torch.distributed.fsdp", "transformers", "safetensors"),
        extras=("trainer", "gpu-fsdp2"),
        also_shown=("transformers",),
        tested={"torch": TESTED_TORCH, "transformers": TESTED_TRANSFORMERS},
    ),
    build="services.trainer.backends.fsdp2.backend:build",
    options=Fsdp2Options,
    ranks_multiple=lambda options: lcm(options.fsdp_size or 1, options.sequence_parallel_size),
    role_options={
        "reference": frozenset({"logprob_chunk_tokens", *OF_EACH_MODEL}),
        "critic": frozenset({"offload_optimizer", "offload_activations", *OF_EACH_MODEL}),
    },
    check="millrace.fsdp2.rules:check_submission",
    across_hosts="millrace.fsdp2.rules:across_hosts",
    takes_images=True,
    trains_towers=True,
    trains_adapters=True,
    publishes_adapters=True,
    memory="millrace.memory.fsdp2:predict",
    model_check="services.trainer.backends.fsdp2.model_check",
)
