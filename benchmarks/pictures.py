"""A job whose prompts have four pictures each: a random model of a published shape, and vLLM.

    python -m benchmarks.pictures --shape qwen2.5-vl-7b --steps 8
    python -m benchmarks.pictures --shape qwen3-vl-2b --share-gpus --max-staleness 0

A local stack with one trainer and one replica: on a host with two GPUs one each. Prints a JSON object for each step:
seconds of its parts, KL of engine and trainer over tokens of the same version and over all, publication and its pause,
MFU, and the trainer's peak of memory. `--shape tiny` shows on a CPU that it runs.
"""

import argparse
import hashlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from benchmarks.stacks import stack_in
from millrace.data.row import PromptRow, write_rows
from millrace.demo.model import PATCHES
from millrace.demo.tasks import IMAGE, VIDEO, VISION_END, VISION_START
from millrace.demo.tokenizer import CHAT_TEMPLATE_WITH_IMAGES
from millrace.spec import JobSpec, parse

PICTURES = 4
TOLD = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/ref",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "publication/pause_s",
    "publication/bytes",
    "rollout_corr/k3_kl",
    "rollout_corr/k3_kl/same_version",
    "perf/mfu/actor",
    "perf/throughput",
    "perf/max_memory_allocated_gb",
    "prompt_length/mean",
    "response_length/mean",
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", VISION_START, VISION_END, IMAGE, VIDEO)
LARGE: dict[str, Any] = {"words": 151643, "lengths": (2048, 512), "prompts": 16}
TOWER_OF_2B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {
        **LARGE,
        "type": "qwen2_5_vl",
        "side": 560,
        "text": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        "tower": {"hidden_size": 1280, "out_hidden_size": 3584},
        "section": [16, 24, 24],
        "lora": {"rank": 64, "alpha": 32},
        "engine_options": {"max_model_len": 2560, "gpu_memory_utilization": 0.85},
    },
    "qwen3-vl-2b": {
        **LARGE,
        "type": "qwen3_vl",
        "side": 640,
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        "tower": {**TOWER_OF_2B, "deepstack_visual_indexes": [5, 11, 17]},
        "section": [24, 20, 20],
        "rope": {"mrope_interleaved": True},
        "engine_options": {"max_model_len": 2560, "gpu_memory_utilization": 0.35},
    },
    "qwen3.5-2b": {
        **LARGE,
        "type": "qwen3_5",
        "side": 640,
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
        "tower": TOWER_OF_2B,
        "section": [11, 11, 10],
        "rope": {"partial_rotary_factor": 0.25, "mrope_interleaved": True},
        "engine_options": {
            "max_model_len": 2560,
            "gpu_memory_utilization": 0.35,
            "additional_config": {"gdn_prefill_backend": "triton"},
        },
    },
    "tiny": {
        "type": "qwen2_5_vl",
        "words": 1000,
        "side": 84,
        "text": {
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "tower": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        "section": [4, 6, 6],
        "lora": {"rank": 32, "alpha": 32},
        "lengths": (256, 32),
        "engine_options": {"max_model_len": 512},
        "prompts": 4,
    },
}
"""`words`: entries of the vocabulary before the special tokens. `side`: of a picture, in pixels. `tower`: what differs
from transformers' own. `lengths`: of a prompt with its pictures, and of an answer, in tokens. `prompts`: of a step."""


def score(solution_str: str, **_: Any) -> float:
    """A reward of the answer's text that no two answers share."""
    return hashlib.sha256(solution_str.encode()).digest()[0] / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-7b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="answers of a prompt")
    parser.add_argument("--backend", default="fsdp2")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--share-gpus", action="store_true", help="as of millrace up: one GPU is enough")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of the whole job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder, shape = Path(name), SHAPES[options.shape]
        made_model(folder / "model", shape)
        rows(folder / "rows.parquet", shape, options.steps)
        with stack_in(folder / "stack", share_gpus=options.share_gpus) as (_, client):
            asked = client.submit(job(folder, shape, options)).id
            try:
                done = client.wait(asked, options.timeout_s)
                print(json.dumps({"state": done.state.value, "failure": done.failure}))
            finally:
                for row in client.metrics(asked):
                    print(json.dumps({"step": row.step, **{key: row.values.get(key) for key in TOLD}}), flush=True)


def made_model(folder: Path, shape: dict[str, Any]) -> None:
    """A model folder with random weights, its tokenizer and its processor of images."""
    tokenizer = _tokenizer(shape["words"])
    tokenizer.save_pretrained(folder)
    names = {"image": IMAGE, "video": VIDEO, "vision_start": VISION_START, "vision_end": VISION_END}
    ids: dict[str, Any] = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": shape["section"], **shape.get("rope", {})}
    text = {
        **shape["text"],
        "max_position_embeddings": 32768,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tied = shape["text"].get("tie_word_embeddings", False)
    entries = {"text_config": text, "vision_config": shape["tower"], "tie_word_embeddings": tied, **ids}
    config = AutoConfig.for_model(shape["type"], **entries)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    newer = {} if shape["type"] == "qwen2_5_vl" else {"patch_size": 16, "min_pixels": 32 * 32}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", **PATCHES, "max_pixels": shape["side"] ** 2, **newer}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _tokenizer(words: int) -> PreTrainedTokenizerFast:
    """The tokenizer makes one token of each byte of a text; only the model says the other words of the vocabulary."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = CHAT_TEMPLATE_WITH_IMAGES
    return made


def rows(path: Path, shape: dict[str, Any], steps: int) -> None:
    """Prompts of pictures with smooth random colours."""
    rng = np.random.default_rng(0)

    def picture() -> bytes:
        coarse = Image.fromarray(rng.integers(0, 256, (14, 14, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((shape["side"], shape["side"]), Image.Resampling.BICUBIC).save(file, "PNG")
        return file.getvalue()

    def row(number: int) -> PromptRow:
        content = [*({"type": "image"} for _ in range(PICTURES)), {"type": "text", "text": f"compare them, {number}"}]
        files = tuple(picture() for _ in range(PICTURES))
        return PromptRow(number, "pictures", [{"role": "user", "content": content}], ground_truth="", images=files)

    write_rows(path, [row(number) for number in range(shape["prompts"] * (steps + 2))])


def job(folder: Path, shape: dict[str, Any], options: argparse.Namespace) -> JobSpec:
    prompt, answer = shape["lengths"]
    return parse(
        {
            "name": f"pictures {options.shape}",
            "output": str(folder / "output"),
            "model": {"path": str(folder / "model"), "lora": shape.get("lora")},
            "data": {
                "files": [str(folder / "rows.parquet")],
                "max_prompt_tokens": prompt,
                "images": {"max_per_prompt": PICTURES},
            },
            "reward": {"function": f"{Path(__file__).resolve()}:score", "workers": 2},
            "rollout": {
                "samples_per_prompt": options.samples,
                "max_response_tokens": answer,
                "engine_options": shape["engine_options"],
            },
            "algorithm": {"preset": "grpo"},
            "trainer": {
                "backend": options.backend,
                "token_budget": 16384,
                "activation_recompute": True,
                "optimizer": {"lr": 1e-5},
            },
            "schedule": {
                "steps": options.steps,
                "prompts_per_step": shape["prompts"],
                "max_staleness": options.max_staleness,
            },
        }
    )


if __name__ == "__main__":
    main()
