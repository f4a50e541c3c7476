"""The cost of a sequence: matrix products grow with its length, attention with the pairs of tokens that attend to each
other. Torch-free."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

PASSES = 3.0
"""Forward and backward in terms of the forward pass: a backward pass computes two products for each of the forward."""
STATE_PRODUCTS = 3
"""Products of a token with the state of a recurrent layer."""
LINEAR = "linear_attention"
"""Kind of a recurrent layer in the entry `layer_types` of a config."""
INTERVAL = 4
"""One layer in this many attends if a config has neither `layer_types` nor `full_attention_interval`."""


def text_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a Hugging Face config, with those of its text part in their place."""
    return {**config, **(config.get("text_config") or {})}


def recurrence_by_layer(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has a recurrence (linear attention) instead of attention, by the entries of a Hugging Face
    config (of its text part). Empty for a model without such layers.

    Older configs of GatedDeltaNet have no `layer_types`, and some of them no `full_attention_interval`.
    """
    if kinds := config.get("layer_types"):
        found = tuple(kind == LINEAR for kind in kinds)
    elif config.get("linear_num_value_heads"):
        interval = config.get("full_attention_interval") or INTERVAL
        found = tuple(bool((layer + 1) % interval) for layer in range(int(config["num_hidden_layers"])))
    else:
        return ()
    return found if any(found) else ()


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer."""

    query_width: int
    """Query heads times the dimensions of one query or key."""
    value_width: int
    """Query heads times the dimensions of one value."""
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    state: int = 0
    """Elements of the state of a recurrent layer, which attends to no tokens: heads times dimensions of a key times
    those of a value."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any], layer: int) -> Self:
        """The attention of a layer, by the entries of a Hugging Face config (of its text part). A layer of linear
        attention (GatedDeltaNet, arXiv 2412.06464) has a state instead. With latent attention (arXiv 2412.19437) a
        query has a part with positions and one without, and values may have another size."""
        kinds = config.get("layer_types")
        if kinds and kinds[layer] == LINEAR and config.get("linear_num_value_heads"):
            sizes = config["linear_key_head_dim"] * config["linear_value_head_dim"]
            return cls(0, 0, state=config["linear_num_value_heads"] * sizes)
        by_layer = config.get("num_attention_heads_per_layer")
        heads = by_layer[layer] if by_layer else config["num_attention_heads"]
        plain = config.get("head_dim") or config["hidden_size"] // heads
        query, value = plain, config.get("v_head_dim") or plain
        if config.get("kv_lora_rank"):
            query = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        slides = kinds[layer] == "sliding_attention" if kinds else config.get("use_sliding_window") is not False
        return cls(heads * query, heads * value, (config.get("sliding_window") or None) if slides else None)


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a sequence of s tokens: per_token · s + per_token_pair · s², and the same for windows. For planning only
    the ratio matters.

    In a model's FLOPs causal attention counts half of the square: s² / 2 pairs of tokens. With a window of w tokens
    they are s · w - w² / 2.
    """

    per_token: float = 1.0
    per_token_pair: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    """(w, cost of a pair): as `per_token_pair`, for layers whose tokens see w tokens, themselves included."""

    def __post_init__(self) -> None:
        parts = [self.per_token, self.per_token_pair, *(cost for _, cost in self.windows)]
        if min(parts) < 0 or sum(parts) == 0:
            raise ValueError(f"{self} gives no positive cost: no part may be negative, nor all zero.")

    @classmethod
    def of_model(cls, matmul_parameters: float, attention: Iterable[AttentionLayer]) -> Self:
        """FLOPs of training a causal transformer on a sequence, forward and backward.

        `matmul_parameters` are those that multiply each token: attention's projections, MLP, router, shared experts and
        as many experts as a token is sent to, and the output head; each costs 2 FLOPs a token and pass. Attention costs
        2 FLOPs for each pair of tokens and each element of a query and of a value. A token reads a recurrent layer's
        state with its key, adds to it, and reads it with its query: 2 FLOPs each for every element.
        """
        pairs: Counter[int | None] = Counter()
        products = matmul_parameters
        for layer in attention:
            pairs[layer.window] += layer.query_width + layer.value_width
            products += STATE_PRODUCTS * layer.state
        return cls(
            2 * PASSES * products,
            PASSES * pairs.pop(None, 0),
            tuple((window, PASSES * width) for window, width in sorted(pairs.items()) if window is not None),
        )

    def of(self, length: int) -> float:
        """Cost of a sequence of `length` tokens."""
        seen = sum(cost * _square(length, window) for window, cost in self.windows)
        return self.per_token * length + self.per_token_pair * length * length + seen

    def total(self, lengths: Iterable[int]) -> float:
        """Cost of the sequences of one micro-batch, which do not attend to each other."""
        return sum(map(self.of, lengths))


def _square(length: int, window: int) -> int:
    """Twice the pairs of tokens that attend to each other: the square of the length without a window."""
    return length * length if length <= window else (2 * length - window) * window
