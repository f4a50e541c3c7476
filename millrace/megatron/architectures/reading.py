"""Functions for the configs of all architectures: sizes, positions, and refusing values that are not supported."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.errors import InvalidJob
from millrace.megatron.architectures.shape import Recurrence, Rope
from millrace.sequence_cost import recurrence_by_layer
from millrace.weights.plans.manifest import ITEM_BYTES

THETA = 10000.0
"""Base of the rotary positions that transformers takes for a config without one, for most architectures."""


def sizes(config: Mapping[str, Any], theta: float = THETA) -> dict[str, Any]:
    """The fields of a ModelShape that all these configs have under the same names. `theta` is what transformers takes
    for a config that states no base of the rotary positions. Raises KeyError for a missing entry: if transformers
    has a default for it, that is the size of one model."""
    refuse_unless(config, "hidden_act", "silu")
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "heads": heads,
        "key_value_heads": config["num_key_value_heads"] or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocabulary": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "norm_epsilon": config["rms_norm_eps"],
        "rope": rope(config, theta=theta),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }


def rope(config: Mapping[str, Any], kinds: tuple[str, ...] = ("default",), theta: float = THETA) -> Rope:
    """The rotary positions from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`. Raises InvalidJob
    for a type that is not in `kinds`, which the caller supports, and for an entry that megatron-core does not follow.
    `theta` as in `sizes`."""
    stated = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = stated.get("rope_type") or stated.get("type") or "default"
    kind = "default" if kind == "mrope" else kind
    if kind not in kinds:
        fix = f"use trainer.backend fsdp2, or a config with rope_type {' or '.join(kinds)}."
        raise InvalidJob(f"model.path: the megatron backend cannot build rope_type {kind!r}.", fix)
    theta = stated.get("rope_theta") or config.get("rope_theta") or theta
    refuse_unless({**config, **stated}, "partial_rotary_factor", None, 1.0)
    if kind == "default":
        return Rope(theta, sections=tuple(map(int, stated.get("mrope_section") or ())))
    refuse_unless(stated, "attention_factor", None)
    refuse_unless(stated, "truncate", None, True)
    if not stated.get("mscale_all_dim"):
        # transformers follows mscale only beside mscale_all_dim; megatron-core and vLLM follow it alone too.
        refuse_unless(stated, "mscale", None, 1.0)
    elif not stated.get("mscale"):
        refuse_unless(stated, "mscale_all_dim", None, 0.0)
    return Rope(
        theta,
        kind="yarn",
        factor=stated["factor"],
        original_context=config.get("original_max_position_embeddings")
        or stated.get("original_max_position_embeddings")
        or config["max_position_embeddings"],
        beta_fast=stated.get("beta_fast") or 32.0,
        beta_slow=stated.get("beta_slow") or 1.0,
        mscale=stated.get("mscale") or 1.0,
        mscale_all_dim=stated.get("mscale_all_dim") or 0.0,
    )


def partial_rope(config: Mapping[str, Any]) -> Rope:
    """The positions of a model of which only a part of each head has some, and of which the axes of images take turns.
    Raises KeyError if the part is not stated, and InvalidJob as `rope` does."""
    stated = config.get("rope_parameters") or {}
    part = stated["partial_rotary_factor"] if "partial_rotary_factor" in stated else config["partial_rotary_factor"]
    plain = {**stated, "partial_rotary_factor": 1.0}
    whole = rope({**config, "partial_rotary_factor": 1.0, "rope_parameters": plain})
    return replace(whole, fraction=float(part), interleaved=True)


def recurrence(config: Mapping[str, Any], *, by_key_head: bool = False) -> Recurrence | None:
    """The layers of GatedDeltaNet; None if the model has none."""
    recurrent = recurrence_by_layer(config)
    if all(recurrent) or not config.get("linear_num_value_heads"):
        return None
    return Recurrence(
        recurrent,
        int(config["linear_num_key_heads"]),
        int(config["linear_num_value_heads"]),
        int(config["linear_key_head_dim"]),
        int(config["linear_value_head_dim"]),
        int(config["linear_conv_kernel_dim"]),
        ITEM_BYTES.get(str(config.get("mamba_ssm_dtype"))),
        by_key_head,
    )


def refuse_unless(config: Mapping[str, Any], field: str, *built: Any) -> None:
    """Raises InvalidJob if the config has `field` with a value that is not one of `built`. The field may be
    missing."""
    if field in config and config[field] not in built:
        raise InvalidJob(
            f"model.path: the config says {field} = {config[field]!r}, which the megatron backend cannot build.",
            f"use trainer.backend fsdp2, or a model with {field} = {' or '.join(map(repr, built))}.",
        )
