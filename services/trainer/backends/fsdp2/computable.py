"""Which architectures this backend computes correctly.

Packed sequences must have the same results as each sequence alone, and training the same as the engine. Any other
architecture would be trained as a different model, without an error."""

from typing import Any

from transformers import PreTrainedModel

from millrace.backends.fsdp2 import Fsdp2Options
from millrace.errors import refused
from millrace.fsdp2 import sequence_parallel
from services.trainer.backends.fsdp2 import attention

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
ANOTHER = "choose another architecture."
FLASH = (
    'set trainer.backend_options.attention to "flash_attention_2", where the architecture has it, or choose another.'
)


def named(implementation: str) -> str:
    """Name of an attention implementation in trainer.backend_options."""
    return {attention.SEGMENTS: "segments", attention.VARLEN: "varlen"}.get(implementation, implementation)


def check_shared(options: Fsdp2Options, config: Any) -> None:
    """Raises InvalidJob where ranks cannot share micro-batches of a model with this config as the options say."""
    text = config.get_text_config()
    entries = {name: getattr(text, name, None) for name in sequence_parallel.CONFIG_ENTRIES}
    sequence_parallel.check(options, entries)


def check_computable(module: PreTrainedModel, implementation: str, path: str, field: str) -> None:
    """Raises InvalidJob where `module`, built from the folder `path`, would be computed as a different model with this
    attention `implementation`. The error names `field` of the job spec."""
    config = module.config.get_text_config()
    kinds = {type(part) for part in module.modules() if isinstance(part, PreTrainedModel)}
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS)
    if layers:
        reason = f"packed sequences come out wrong in its layers of {', '.join(layers)}"
        raise refused(field, path, reason, ANOTHER)
    if any(kind._is_stateful for kind in kinds):
        reason = f"the state of {type(module).__name__}'s layers would run from one packed sequence into the next"
        raise refused(field, path, reason, ANOTHER)
    if config.model_type == "phimoe":
        raise refused(field, path, "its router draws experts at random in training", ANOTHER)
    if implementation == "flash_attention_2":
        return
    if getattr(config, "attn_logit_softcapping", None) is not None:
        reason = f"{named(implementation)} attention leaves out its attn_logit_softcapping"
        raise refused(field, path, reason, FLASH)
    if implementation in (attention.SEGMENTS, attention.VARLEN) and not all(kind._supports_sdpa for kind in kinds):
        reason = f"{type(module).__name__}'s attention is more than torch's scaled_dot_product_attention computes"
        raise refused(field, path, reason, FLASH)
