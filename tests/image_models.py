"""Tiny random models with a tower for images, their processor, and small pictures."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from millrace.data.pictures import WHOLE
from millrace.spec.lora import is_router
from millrace.weights.loader.stored import follow_folder
from tests.models import byte_tokenizer

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, PAD, VIDEO = range(259, 263)
"""Ids of these tokens, after those of `byte_tokenizer`."""
IDS = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}" + SHOWN + "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 24,
}
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
"""Model types that `save_image_model` makes."""
PROCESSOR_3: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 24},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""As the folders of Qwen3-VL and Qwen3.5 have it."""
TEXT_3 = {
    **TEXT,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
TOWER_3 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
"""Positions for 6 x 6 patches: those of larger images are interpolated."""
TEXT_3_5 = {
    **TEXT_3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        **TEXT_3["rope_parameters"],
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.5,
    },
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
TOWER_3_5 = {name: value for name, value in TOWER_3.items() if name != "deepstack_visual_indexes"}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {"shared_expert_intermediate_size": 32}
PUBLISHED_EXPERTS = ("qwen3_5_moe", "qwen3_vl_moe")
"""Kinds whose published folders store the experts of a layer in one tensor, that of Qwen3-VL as [experts, inputs,
outputs]. transformers stores each apart, or in the tensor of its module."""


@torch.no_grad()
def save_image_model(
    folder: Path,
    seed: int = 0,
    tower_seed: int = 0,
    kind: str = "qwen2_5_vl",
    tied: bool = False,
    layers: int | None = None,
) -> Path:
    """Random values in all tensors, those of the tower by `tower_seed`; large enough that a token notices those before
    it and what an image shows. `layers`: of the language model, if that is not Qwen3.5's; None: two or three."""
    with torch.random.fork_rng([]):
        model = built(kind, {**IDS, "tie_word_embeddings": tied}, layers)
        for part, own in ((model.model.visual, tower_seed), (model.model.language_model, seed), (model.lm_head, seed)):
            torch.manual_seed(own)
            for name, parameter in part.named_parameters():
                if parameter.dim() >= 2:
                    inputs = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
                    parameter.normal_(0, 1.2 * inputs**-0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    if kind in PUBLISHED_EXPERTS:
        file = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
        own = {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
        turned = {name: tensor.contiguous() for name, tensor in as_in_module(model, own).items()}
        save_file(kept | turned, file, metadata={"format": "pt"})
    save_processor(folder, PROCESSOR if kind == "qwen2_5_vl" else PROCESSOR_3)
    return folder


def built(kind: str, entries: dict[str, Any], layers: int | None = None) -> Any:
    """The model with the values that transformers gives it. `entries`: of the whole model's config."""
    match kind:
        case "qwen3_5":
            text = {**TEXT_3_5, "tie_word_embeddings": entries["tie_word_embeddings"]}
            config: Any = Qwen3_5Config(text_config=text, vision_config=TOWER_3_5, **entries)
            return Qwen3_5ForConditionalGeneration(config)
        case "qwen3_5_moe":
            text = {**TEXT_3_5, **EXPERTS, **SHARED, "tie_word_embeddings": entries["tie_word_embeddings"]}
            config = Qwen3_5MoeConfig(text_config=text, vision_config=TOWER_3_5, **entries)
            return Qwen3_5MoeForConditionalGeneration(config)
        case "qwen3_vl_moe":
            config = Qwen3VLMoeConfig(
                text_config=TEXT_3 | EXPERTS | {"norm_topk_prob": True}, vision_config=TOWER_3, **entries
            )
            return Qwen3VLMoeForConditionalGeneration(config)
        case "qwen3_vl":
            text = {**TEXT_3, "num_hidden_layers": layers or TEXT_3["num_hidden_layers"]}
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=TOWER_3, **entries))
    text = {**TEXT, "num_hidden_layers": layers or TEXT["num_hidden_layers"]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=TOWER, **entries))


def save_processor(folder: Path, processor: dict[str, Any] = PROCESSOR) -> dict[str, int]:
    """Saves a processor of images, and a tokenizer. Returns the ids of its tokens, as a config names them."""
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIALS]})
    assert tokenizer.convert_tokens_to_ids(SPECIALS[2]) == PAD
    tokenizer.save_pretrained(folder)
    return IDS


def picture(seed: int, width: int, height: int, kind: str = "PNG") -> bytes:
    """The file of a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def opened_model(folder: Path, *, train_tower: bool = False) -> Any:
    """The model of a folder in transformers, float32, its tower frozen unless that is trained."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.model.visual.requires_grad_(train_tower)
    return model


def trained_part(model: Any) -> Any:
    """What the trainer builds of the whole model: of Qwen3.5 the language model. It shares the modules of `model`."""
    if model.config.model_type in WHOLE:
        return model
    with torch.device("meta"):
        part: Any = AutoModelForCausalLM.from_config(model.config)
    part.model, part.lm_head = model.model.language_model, model.lm_head
    follow_folder(part, model.state_dict())
    return part


def whole_of(model: Any, part: Any) -> Any:
    """The whole model with the tower of `model` and `part` as its trained part."""
    if model.config.model_type in WHOLE:
        return part
    whole = copy.deepcopy(model)
    whole.model.language_model, whole.lm_head = part.model, part.lm_head
    return whole


def as_in_module(model: Any, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a published folder, with experts as the module has them; and the reverse."""
    turned = model.config.model_type == "qwen3_vl_moe"
    return {name: t.transpose(1, 2) if turned and ".experts." in name else t for name, t in stored.items()}


def language_layers(model: Any) -> list[str]:
    """Names of the linear layers of its language model that may have an adapter, as the trainer names them."""
    linear = [name for name, part in trained_part(model).named_modules() if isinstance(part, torch.nn.Linear)]
    without = (".visual.", ".linear_attn.")
    return [n for n in linear if not any(part in n for part in without) and not is_router(n) and n != "lm_head"]


def scores_alone(model: Any, folder: Path, tokens: list[int], files: tuple[bytes, ...], prompt: int) -> torch.Tensor:
    """Log-probability of each token after the first `prompt`, by one pass of transformers over the sequence alone,
    with its own processor and its own positions. `tokens` are those that the model sees."""
    from transformers import AutoImageProcessor

    ids = torch.tensor([tokens])
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if files:
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        inputs |= AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")
        kinds = (ids == PAD).int()
        kinds[:, prompt:] = 0
        inputs["mm_token_type_ids"] = kinds
    scores = model(**inputs).logits[0].float().log_softmax(-1)
    return scores[:-1].gather(1, ids[0, 1:, None])[prompt - 1 :, 0]
