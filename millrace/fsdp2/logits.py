"""Models whose logits the fsdp2 backend keeps for a whole micro-batch instead of a chunk of tokens. Torch-free."""

from millrace.spec.lora import Lora

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
"""Model types whose output layer does not follow the last hidden states directly, or whose classes do not tell where
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
