"""What `trainer.backend_options` may say for the `fsdp2` backend. Imports no torch: a job is checked where it is
submitted. What runs is in `services/trainer/backends/fsdp2`."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from millrace.validation.mistakes import options
from millrace.validation.model import StrictModel


class Fsdp2Options(StrictModel):
    attention: Literal["auto", "varlen", "segments", "flash_attention_2", "sdpa"] = "auto"
    """auto: flash_attention_2 where flash-attn is installed; else varlen (torch's kernel for packed sequences: GPUs,
    bfloat16 or float16); else segments (torch's causal kernels on unpacked sequences). sdpa builds the block-diagonal
    mask of the whole micro-batch: for models whose attention takes no other."""
    compile_layers: bool | None = None
    """Compile each decoder layer with torch.compile, which fuses its norms, rotary embedding and activations. It costs
    half a minute at the first step. null: on GPUs where a C compiler is installed."""
    logprob_chunk_tokens: int = Field(1024, ge=16, le=1 << 20)
    """Tokens whose logits exist at a time."""
    offload_reference: bool = False
    """Keep the reference policy in host memory and copy each layer when it is needed."""


def parse(backend_options: Mapping[str, Any]) -> Fsdp2Options:
    """Raises InvalidJob that names every wrong option, its value and what would do."""
    return options(Fsdp2Options, backend_options, "trainer.backend_options")
