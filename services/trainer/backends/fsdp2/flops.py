"""FLOPs of training a transformers model, by the formula of `SequenceCost.of_model`."""

from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from millrace.sequence_cost import AttentionLayer, SequenceCost
from services.trainer.backends.tower import NAME

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk")
"""Entries of configs for the number of experts of a layer, and of those that a token is sent to."""
ATTENTION = (
    "num_attention_heads",
    "num_attention_heads_per_layer",
    "hidden_size",
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "layer_types",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "sliding_window",
    "use_sliding_window",
)
"""Entries of configs that `AttentionLayer.of_config` reads."""

ATTENTIONS = {"diffllama": 2}
"""Model type → how often a layer attends, where that is not once. diffllama subtracts one attention from another."""


def sequence_cost(config: Any, model: PreTrainedModel, *heads: nn.Module) -> SequenceCost:
    """Training FLOPs by sequence length of a transformers model with this `config`, and of `heads` on top of it."""
    return SequenceCost.of_model(active_parameters(config, model, *heads), attention_layers(config.get_text_config()))


def active_parameters(config: Any, model: PreTrainedModel, *heads: nn.Module) -> float:
    """Parameters that multiply each token: every matrix, of experts only the share that a token is sent to, of
    embeddings only those that are the output head too. Towers for images and sound do not count."""
    text, output = config.get_text_config(), model.get_output_embeddings()
    experts = _first(text, EXPERTS) or 1
    share = (_first(text, CHOSEN) or experts) / experts
    parts = [model if text is config else model.get_decoder(), *([] if output is None else [output]), *heads]
    counted = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    counted -= {id(getattr(output, "weight", None))}
    total = 0.0
    for name, parameter in chain.from_iterable(part.named_parameters() for part in parts):
        if parameter.dim() < 2 or id(parameter) in counted or name.startswith(f"{NAME}."):
            continue
        counted.add(id(parameter))
        of_experts = ".experts." in name or (parameter.dim() == 3 and parameter.shape[0] == experts)
        total += parameter.numel() * (share if of_experts else 1.0)
    return total


def attention_layers(text: Any) -> list[AttentionLayer]:
    """The attention of each layer. If layers differ in an entry of the config, transformers has a config of each."""
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    stated = [{name: getattr(layer, name, None) for name in ATTENTION} for layer in layers]
    found = [AttentionLayer.of_config(entries, number) for number, entries in enumerate(stated)]
    return found * ATTENTIONS.get(text.model_type, 1)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)
