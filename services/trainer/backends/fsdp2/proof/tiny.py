"""Changes of a model's config: the same architecture with tiny sizes, and dropout and noise.

Of the tiny one widths, numbers of heads, experts and layers, the vocabulary, and lengths of windows are made small.
Everything else stays: the size of a head, kinds of layers, rotary positions, caps, sinks, biases, norms."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

NOISE = ("dropout", "_pdrop", "layerdrop", "jitter_noise")
"""Endings of entries of configs."""
JITTER = ("jitter_noise",)
"""Endings of those that routers may use in generation too."""
VOCABULARY = 256
WINDOW = 8
"""Shorter than the longest sequence of the proof, so that windows cut it."""
LAYERS = 2
"""Layers if the config does not list the kind of each."""
MOST_FIRST_LAYERS = 4
"""Most first layers that are kept. If more are needed to have one of each kind, others between them are left out."""
MIDDLE = 64
"""Largest width inside a feed-forward layer."""
INSIDE = ("intermediate", "ffn", "n_inner", "d_ff")
"""Parts of the names of such widths."""
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "decoder_layers", "depth")
HEAD_COUNTS = ("num_attention_heads", "decoder_attention_heads", "num_heads")
GROUP_COUNTS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("hidden_size", "d_model", "embed_dim")
SHARED_LAYERS = "num_kv_shared_layers"
"""The last layers, which have the keys and values of earlier ones of their kind."""
AT_MOST: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "local_attention": 2 * WINDOW,
    "attention_chunk_size": WINDOW,
    "index_topk": WINDOW // 2,
    "index_block_size": WINDOW // 4,
    "index_topk_blocks": 1,
}
"""Largest values of other entries."""


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config like this one with small sizes. Raises what its class raises for entries that do not fit together."""
    made = type(config).from_dict(_small(config))
    made._name_or_path = config._name_or_path  # the code of a model that transformers does not have is there
    return made


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """The entries that differ from the defaults of the config's class, and those that are made small."""
    entries, stated = config.to_dict(), config.to_diff_dict()
    named = {own: common for common, own in config.attribute_map.items()}
    by_name = {named.get(own, own): value for own, value in entries.items()}
    before, kept = _layers(by_name)
    changes = {name: len(kept) for name in LAYER_COUNTS if before is not None and by_name.get(name) == before}
    changes |= _heads(by_name)
    if by_name.get(SHARED_LAYERS):
        changes[SHARED_LAYERS] = len(kept) // 2
    small = dict[str, Any]()
    for own, value in entries.items():
        name = named.get(own, own)
        if isinstance(part := vars(config).get(own), PreTrainedConfig):
            small[own] = _small(part)
        elif name in changes:
            small[own] = changes[name]
        elif isinstance(value, list | tuple) and before is not None and len(value) == before:
            small[own] = [_entry(name, value[layer]) for layer in kept]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            own_values = {int(layer): entries for layer, entries in value.items()}
            of_kept = {number: own_values[layer] for number, layer in enumerate(kept) if layer in own_values}
            small[own] = {number: _of_layer(each, changes) for number, each in of_kept.items()}
        elif (made := _entry(name, value)) != value or own in stated:
            small[own] = made
    return small


def _of_layer(entries: Any, changes: Mapping[str, int]) -> Any:
    """What a config says of one layer only."""
    if not isinstance(entries, dict):
        return entries
    return {name: changes.get(name, _entry(name, value)) for name, value in entries.items()}


def _entry(name: str, value: Any) -> Any:
    if type(value) is not int:
        return value
    if name in AT_MOST:
        return min(value, AT_MOST[name])
    if name.endswith(("window", "window_size")):
        return min(value, WINDOW)
    if name.endswith("token_id"):
        return min(value, VOCABULARY - 1)
    return min(value, MIDDLE) if any(part in name for part in INSIDE) else value


def _layers(entries: Mapping[str, Any]) -> tuple[int | None, list[int]]:
    """The number of layers, and which of them have all kinds of layers: the first ones, if they are few."""
    before = _first(entries, LAYER_COUNTS)
    if before is None:
        return None, []
    lists = [value for value in entries.values() if isinstance(value, list | tuple) and len(value) == before]
    kinds = [str(kind) for kind in zip(*lists, strict=True)]
    firsts = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    last = max(firsts, default=LAYERS - 1)
    kept = firsts if last >= MOST_FIRST_LAYERS else list(range(min(before, max(last + 1, LAYERS))))
    return before, kept * 2 if entries.get(SHARED_LAYERS) else kept


def _heads(entries: Mapping[str, Any]) -> dict[str, int]:
    """Fewer heads of the same size, with at most two for each key-value head, and the width for them."""
    heads, width = _first(entries, HEAD_COUNTS), _first(entries, WIDTHS)
    if heads is None or width is None:
        return {}
    groups = _first(entries, GROUP_COUNTS) or heads
    fewer = min(groups, 4 if groups == heads else 2)
    new_heads = fewer * min(heads // groups, 2)
    changes = {name: fewer for name in GROUP_COUNTS if type(entries.get(name)) is int}
    changes |= {name: new_heads for name in HEAD_COUNTS if entries.get(name) == heads}
    widths = ("size", "dim", "model", "embd", "width")
    equal = [name for name, value in entries.items() if type(value) is int and value == width]
    return {name: new_heads * (width // heads) for name in equal if name.endswith(widths)} | changes


def _first(entries: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((value for name in names if type(value := entries.get(name)) is int), None)


def set_noise(config: Any, share: float, endings: tuple[str, ...] = NOISE) -> None:
    """Gives every entry with such an ending this value, those of the text part too."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if name.endswith(endings) and isinstance(value, float):
                setattr(part, name, share)
