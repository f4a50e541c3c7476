"""What engines and Megatron-Core compute otherwise than transformers: the differences that several of them share."""

import math
from collections.abc import Mapping
from typing import Any

LATENT_NORMS = frozenset(["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3"])
"""Model types whose norms of latents have an epsilon of 1e-6 in transformers, and `rms_norm_eps` in engines and in
Megatron-Core."""
DEEPSEEK_YARN = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""Model types whose rotary positions engines compute by DeepSeek's YaRN if they are scaled: it follows `mscale` and
`mscale_all_dim` alone, too, and neither `attention_factor` nor `truncate`."""
LARGEST_EPSILON = 1e-5
"""Up to it log-probabilities of tiny models differ by less than 0.0001 nats; with 1e-3 by 0.015."""
ORIGINAL = "original_max_position_embeddings"


def unequal_in_engines(
    who: str,
    config: Mapping[str, Any],
    assumed: Mapping[str, Mapping[str, Any]],
    ignored: Mapping[str, Mapping[str, Any]],
    missing: Mapping[str, Mapping[str, Any]],
) -> str:
    """Why the engine `who` computes a model otherwise than transformers; empty if none of what engines share is known
    of it. `config`: the entries of the text part of its config.json.

    By model type, with a value for each entry: those that the engine does not read (`assumed`) and those that
    transformers does not (`ignored`), with what it computes with; what the other of the two takes for an entry that
    the config does not have, where that is another value (`missing`).
    """
    kind = str(config.get("model_type"))
    otherwise = missing.get(kind, {})
    for name, value in assumed.get(kind, {}).items():
        if (stated := config.get(name, otherwise.get(name, value))) != value:
            return f"{who} does not follow {name} = {stated!r}: it computes {kind} with {value!r}"
    for name, value in ignored.get(kind, {}).items():
        if (stated := config.get(name, otherwise.get(name, value))) != value:
            return f"{who} takes {name} = {stated!r}, and transformers computes {kind} with {value!r} whatever it is"
    if kind == "deepseek_v2" and config.get("topk_method") == "greedy" and (config.get("n_group") or 1) > 1:
        return f"{who} chooses experts by groups although its topk_method is greedy"
    return other_latent_norms(who, config) or _other_yarn(who, config) or _other_longrope(who, config)


def other_latent_norms(who: str, config: Mapping[str, Any]) -> str:
    """Why the norms of latent attention are other in `who` than in transformers; empty if they are not."""
    kind, epsilon = config.get("model_type"), config.get("rms_norm_eps")
    if kind not in LATENT_NORMS or not isinstance(epsilon, int | float) or epsilon <= LARGEST_EPSILON:
        return ""
    return f"{who} norms latents with its rms_norm_eps of {epsilon:g}, and transformers with 1e-06"


def _other_yarn(who: str, config: Mapping[str, Any]) -> str:
    """The same of rotary positions of latent attention, for which DeepSeek's code has a YaRN of its own."""
    kind, (rope, type_) = config.get("model_type"), rotary(config)
    if kind not in DEEPSEEK_YARN or type_ == "default":
        return ""
    if type_ != "yarn":
        return f"{who} takes the rotary positions of {kind} for yarn, and its config has the type {type_}"
    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    followed: dict[str, Any] = {"attention_factor": None, "truncate": True}
    if not one or not other:
        followed |= {"mscale_all_dim": None} if other else {"mscale": 1.0}
    for name, value in followed.items():
        if (stated := rope.get(name, value)) not in (value, None):
            return f"{who} and transformers do not both follow {name} = {stated!r} of {kind}'s yarn settings"
    return ""


def rotary(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The settings of rotary positions that a config has, and their type."""
    settings: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return settings, settings.get("rope_type") or settings.get("type") or "default"


def _other_longrope(who: str, config: Mapping[str, Any]) -> str:
    """Why sines and cosines of LongRoPE have another factor in `who` than in transformers; empty if they have not."""
    rope, type_ = rotary(config)
    longest = config.get("max_position_embeddings")
    original = config.get(ORIGINAL) or rope.get(ORIGINAL) or longest
    if type_ != "longrope" or not longest or not original:
        return ""
    theirs = rope.get("short_mscale") or _longrope_factor(longest / original, original)
    ours = rope.get("attention_factor") or _longrope_factor(rope.get("factor") or longest / original, original)
    if math.isclose(theirs, ours, rel_tol=1e-6):
        return ""
    return (
        f"{who} computes its rotary positions (longrope) with a factor of {theirs:.6g}, and transformers of {ours:.6g}"
    )


def _longrope_factor(scale: float, original: int) -> float:
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
