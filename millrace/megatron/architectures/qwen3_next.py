"""Qwen3-Next, Qwen3.5 and 3.6: layers of GatedDeltaNet beside full attention with a gate of its output, norms around 1,
positions for a part of each head, and in models with experts a gated shared expert.

Of models with a tower for images the language model is built. Layers for multi-token prediction are not loaded.
"""

from collections.abc import Mapping
from typing import Any

from millrace.errors import InvalidJob
from millrace.megatron.architectures.reading import THETA, partial_rope, recurrence, refuse_unless, sizes
from millrace.megatron.architectures.shape import ExpertShape, ModelShape, Names
from millrace.sequence_cost import text_entries

NAMES = Names(
    shared_gate="mlp.shared_expert.gate_proj.weight",
    shared_up="mlp.shared_expert.up_proj.weight",
    shared_down="mlp.shared_expert.down_proj.weight",
    untrained=(r"^(model\.)?visual\.",),
)
TIED = "tie_word_embeddings"
WITH_EXPERTS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")


def shape(config: Mapping[str, Any]) -> ModelShape:
    text = text_entries(config)
    if TIED in config:
        refuse_unless(text, TIED, config[TIED])
    refuse_unless(text, "attention_bias", False)
    refuse_unless(text, "attn_output_gate", True)
    refuse_unless(text, "mlp_only_layers", None, [])
    refuse_unless(text, "decoder_sparse_step", 1)
    refuse_unless(text, "norm_topk_prob", True)
    kind = str(config["model_type"])
    experts = _experts(text) if kind in WITH_EXPERTS and text["num_experts"] else None
    if experts is not None:
        text.setdefault("intermediate_size", experts.shared_ffn)  # no layer is dense
    found = recurrence(text, by_key_head=kind == "qwen3_next")
    if found is None:
        kinds = text.get("layer_types")
        fix = "use trainer.backend fsdp2, or a model with layers of both kinds."
        raise InvalidJob(f"model.path: the config's layers are all of one kind: layer_types = {kinds!r}.", fix)
    common = sizes({**text, "rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": 1.0}, THETA)
    common |= {"rope": partial_rope(text), "head_dim": text["head_dim"]}
    return ModelShape(
        architecture=kind,
        query_key_norm=True,
        gated=True,
        centred_norms=True,
        recurrence=found,
        experts=experts,
        names=NAMES,
        **common,
    )


def _experts(text: Mapping[str, Any]) -> ExpertShape:
    return ExpertShape(
        count=text["num_experts"],
        per_token=text["num_experts_per_tok"],
        ffn=text["moe_intermediate_size"],
        layers=(True,) * text["num_hidden_layers"],
        shared_ffn=text["shared_expert_intermediate_size"],
        shared_gate=True,
    )
