"""Tiny random models of every architecture that the backend builds, as ordinary Hugging Face folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests import hybrid_models

COMMON: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
LATENT: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_nextn_predict_layers": 0,
    # As DeepSeek's own folders say: without the method vLLM has no bias of the router, without the
    # frequency SGLang does not start.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


SERVED: dict[str, Any] = {"hidden_size": 128}
SERVED_LATENT: dict[str, Any] = {**SERVED, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Sizes that the kernels of vLLM's CPU build take: heads of 32, a latent cache of 576."""


def random_model(kind: str, *, served: bool = False, **sizes: int) -> PreTrainedModel:
    """Weights larger than the usual start, float32: distributions far from uniform, experts far from alike. `served`:
    of sizes that vLLM's CPU build takes. `sizes` go before both."""
    torch.manual_seed(0)
    grouped, latent = ({**GROUPED, **SERVED}, {**LATENT, **SERVED_LATENT}) if served else (GROUPED, LATENT)
    model = _untrained(kind, {**grouped, **sizes}, {**latent, **sizes}).float().eval()
    biases = [buffer for name, buffer in model.named_buffers() if "bias" in name]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name or "bias" in name else 0.08))
        for buffer in biases:
            buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def _untrained(kind: str, grouped: dict[str, Any], latent: dict[str, Any]) -> PreTrainedModel:
    match kind:
        case _ if kind in hybrid_models.KINDS:
            return hybrid_models.built(kind)  # type: ignore[no-any-return]
        case "qwen2":
            from transformers import Qwen2Config, Qwen2ForCausalLM

            return Qwen2ForCausalLM(Qwen2Config(**grouped, tie_word_embeddings=True))
        case "qwen3":
            from transformers import Qwen3Config, Qwen3ForCausalLM

            return Qwen3ForCausalLM(Qwen3Config(**grouped, head_dim=32, tie_word_embeddings=False))
        case "qwen3_moe":
            from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**experts, **grouped}, head_dim=32, mlp_only_layers=[1]))
        case "mixtral":
            from transformers import MixtralConfig, MixtralForCausalLM

            return MixtralForCausalLM(MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2))
        case "deepseek_v3":
            from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

            groups = {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}
            return DeepseekV3ForCausalLM(DeepseekV3Config(**{**groups, **latent}, rope_parameters=YARN))
        case "moonlight":
            from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

            own = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
            return DeepseekV3ForCausalLM(DeepseekV3Config(**{**own, **latent}, rope_parameters=PLAIN))
        case "qwen2_5_vl":
            from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

            hidden = grouped["hidden_size"]
            vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": hidden}
            axes = {**PLAIN, "mrope_section": [hidden // 32, 3 * hidden // 64, 3 * hidden // 64]}
            text = {**grouped, "rope_parameters": axes}
            config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "fullatt_block_indexes": [0]})
            return Qwen2_5_VLForConditionalGeneration(config)
        case "qwen3_vl":
            from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

            axes = {**PLAIN, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
            vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
            vision |= {"out_hidden_size": grouped["hidden_size"], "deepstack_visual_indexes": [0]}
            text = {**grouped, "head_dim": 32, "rope_parameters": axes}
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))
    raise ValueError(kind)


def save(kind: str, folder: Path, *, served: bool = False, **sizes: int) -> PreTrainedModel:
    model = random_model(kind, served=served, **sizes)
    model.save_pretrained(folder)
    return model


def save_text_path(model: PreTrainedModel, folder: Path) -> None:
    """Saves the text model of a Qwen2.5-VL as a Qwen2, whose positions have one axis."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    text = model.config.get_text_config()
    sizes = {name: getattr(text, name) for name in (*GROUPED, "rms_norm_eps")}
    alone = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=False, rope_parameters=PLAIN)).float()
    weights = {name.replace("model.language_model.", "model."): w for name, w in model.state_dict().items()}
    alone.load_state_dict({name: w for name, w in weights.items() if not name.startswith("model.visual.")})
    alone.save_pretrained(folder)
