"""Architectures of transformers that the fsdp2 backend computes right, those that it refuses, and those whose logits it
keeps for a whole micro-batch instead of a chunk of tokens. Torch-free.

Each was tried with a tiny random model, by tests/services/trainer/backends/fsdp2/sweep.py. One that is in none of these
tables is tried so when a trainer or `millrace validate` builds it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import Mistake, wrong_value
from millrace.spec.lora import Lora
from millrace.weights.folder_tensors import TURNED

MORE_LAYERS = frozenset(
    {
        "bert",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "mllama",
        "mllama_text_model",
        "modernbert-decoder",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Model types whose output layer does not follow the last hidden states directly, or whose classes do not say where
they are."""
OUTPUT_LAYERS = ("lm_head", "embed_out", "output_projection")
"""Names of output layers."""


def keeps_whole_logits(model_type: str, lora: Lora | None) -> bool:
    """Whether a job's logits exist for all tokens of a micro-batch: with an adapter on the output layer, and in models
    of `MORE_LAYERS`."""
    if model_type in MORE_LAYERS:
        return True
    if lora is None or isinstance(lora.target_modules, str):
        return False
    return any(name in lora.target_modules and name not in lora.exclude_modules for name in OUTPUT_LAYERS)


ATTENTIONS = ("segments", "flash_attention_2", "sdpa")
"""Values of trainer.backend_options.attention that were tried. `varlen` is as `segments`."""
_RIGHT = """
    apertus arcee aria_text axk1 bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama dots1
    emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma3 gemma3_text gemma3n_text gemma4
    gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite
    granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe
    laguna llama longcat_flash mellum minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama
    modernbert-decoder nanochat olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal qwen2 qwen2_moe qwen3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
    solar_open starcoder2 whisper youtu"""
RIGHT = frozenset(_RIGHT.split())
"""Right with each of ATTENTIONS."""
GATED_DELTA = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
"""Model types (of the text part) with layers of GatedDeltaNet, which the backend computes for each sequence apart."""
RIGHT_WITH: Mapping[str, tuple[str, ...]] = {
    "afmoe": ("segments", "flash_attention_2"),
    "gemma2": ("flash_attention_2",),
    "got_ocr2": ("segments",),
    "moshi": ("sdpa",),
    "nemotron": ("flash_attention_2", "sdpa"),
    "opt": ("segments", "flash_attention_2"),
    "stablelm": ("flash_attention_2", "sdpa"),
    "vaultgemma": ("flash_attention_2",),
}
"""Right with some."""
BY_REASON: Mapping[str, str] = {
    "the state of its recurrent, linear or convolutional layers would run from one packed sequence into the next": """
    bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    nemotron_h olmo_hybrid recurrent_gemma rwkv xlstm zamba zamba2 zaya""",
    "its layers choose which tokens to attend to, and packed attention would attend to all": """
    axk2 deepseek_v32 deepseek_v4 doge glm_moe_dsa hy_v4 minimax_m3_vl_text""",
    "its attention has sinks, which packed attention leaves out": """
    gpt_oss granite_swa granitemoe_swa mimo_v2_flash""",
    "its chunked attention would count chunks from the start of a packed row": """
    llama4 llama4_text""",
    "its router cuts by router_jitter_noise in generation, and trains by another rule": """
    phimoe""",
    "its attention or its positions do not take packed sequences": """
    bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert codegen cpmant
    data2vec-text electra ernie falcon git gpt_neo gpt_neox_japanese gptj marian mbart megatron-bert mpt mvp openai-gpt
    pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr xglm xlm xlm-roberta
    xlm-roberta-xl xlnet xmod""",
}
_UNTRIED = """
    blt cohere_compass_text dbrx gemma3n gemma4_assistant gemma4_unified_assistant musicgen musicgen_melody
    qwen4_exp qwen4_exp_text reformer"""
UNTRIED = frozenset(_UNTRIED.split())
"""Model types whose config class has no defaults of which a small model can be made; a job's own config is tried."""
REFUSED: Mapping[str, str] = {name: reason for reason, names in BY_REASON.items() for name in names.split()}
"""The reason for each model type that is right with no attention implementation."""


CONFIG_ENTRIES = ("model_type", "hidden_size", "moe_intermediate_size")
"""Entries that the rules read."""


def mistakes_of(config: Mapping[str, Any], field: str, path: str) -> Iterator[Mistake]:
    """The mistake of a model of a refused architecture, or whose folder can be read in two ways; `field` names its
    folder `path`. `config` has the entries of its text part."""
    model_type = str(config.get("model_type"))
    inner, hidden = config.get("moe_intermediate_size"), config.get("hidden_size")
    if model_type == f"{TURNED}_text" and inner and hidden in (inner, 2 * inner):
        square = (
            f"with hidden_size {hidden} and moe_intermediate_size {inner} its experts have as many inputs as outputs, "
            "and their stored shape does not say which come first"
        )
        yield wrong_value(field, path, square, "choose a model with other sizes.")
    if (reason := REFUSED.get(model_type)) is not None:
        yield wrong_value(field, path, f"its architecture is {model_type}: {reason}", "choose another architecture.")
