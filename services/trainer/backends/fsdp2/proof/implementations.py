"""The attention implementations of this backend as the proof runs them: on the CPU, in float32.

`varlen` takes the same keywords as `segments`, which stands for both. Both releases of flash-attn run on GPUs only, in
half precision, so a slow reference with what they honour stands for them. Both remember which keywords the layers gave
them that they leave out.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from services.trainer.backends.fsdp2 import attention

PROVED = {
    attention.SEGMENTS: "millrace_proof_segments",
    attention.VARLEN: "millrace_proof_segments",
    attention.FLASH2: "millrace_proof_fa",
    attention.FLASH4: "millrace_proof_fa",
}
"""Name in transformers of what stands for an implementation. Any other one is run itself."""
INPUTS = {"millrace_proof_segments": attention.SEGMENTS, "millrace_proof_fa": attention.FLASH2}
"""Whose inputs each of them takes."""
HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that change nothing, or that both take through other ways."""
left_out = set[str]()
"""Keywords that were given and left out since this was cleared."""


class BordersLost(TypeError):
    """A layer does not hand on to its attention where sequences begin."""


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """`attention.attend`."""
    if "segments" not in named:
        raise BordersLost(f"{type(module).__name__} does not tell its attention where sequences begin")
    _remember(named, {"segments", "scaling", "sliding_window"})
    return attention.attend(module, query, key, value, attention_mask, **named)


def attend_flash(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """What flash-attn computes for one packed row, a sequence at a time."""
    _remember(named, {"scaling", "sliding_window", "softcap"})
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    causal = named.get("is_causal")
    parts = []
    lengths = _lengths(named, query.shape[2])
    for q, k, v in zip(*(tensor[0].split(lengths, dim=1) for tensor in (query, key, value)), strict=True):
        scores = q @ k.transpose(1, 2) * (named.get("scaling") or q.shape[-1] ** -0.5)
        if cap := named.get("softcap"):
            scores = cap * (scores / cap).tanh()
        places = torch.arange(q.shape[1], device=q.device)
        behind = places[:, None] - places[None, :]
        window = named.get("sliding_window") or len(places)
        is_causal = getattr(module, "is_causal", True) if causal is None else causal
        seen = behind.abs() < window if not is_causal else (behind >= 0) & (behind < window)
        parts.append(F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v)
    return torch.cat(parts, dim=1).transpose(0, 1)[None].contiguous(), None


def _lengths(named: dict[str, Any], tokens: int) -> list[int]:
    """Lengths of the sequences: as the layer says, else from positions that begin again, else one."""
    if (starts := named.get("cu_seq_lens_q")) is not None:
        return [int(length) for length in starts.diff()]
    if (positions := named.get("position_ids")) is not None and positions.dim() == 2:
        begins = [*(positions[0] == 0).nonzero().flatten().tolist(), tokens]
        return [after - begin for begin, after in itertools.pairwise(begins)]
    return [tokens]


def _remember(named: dict[str, Any], honoured: set[str]) -> None:
    given = {name for name, value in named.items() if value is not None and value is not False}
    left_out.update(given - honoured - HARMLESS)


AttentionInterface.register("millrace_proof_segments", attend)
AttentionInterface.register("millrace_proof_fa", attend_flash)
