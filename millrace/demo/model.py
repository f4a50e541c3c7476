"""A Qwen3 of 427,000 parameters, or of 19 million for GPUs, a Qwen3.5 of 462,000, or a Qwen2.5-VL of 685,000
with a tower for images, warmed until it gets the task right now and then.

The demonstrations are wrong more often than right: most of them copy the word instead of turning it round, or give the
hunt up. So both are in the model's distribution and reinforcement has to choose between them. Warmed on right ones
alone it would jump from almost never to almost always within a few steps, and from random weights it would never find
out.
"""

import io
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from millrace.data.pictures import PROCESSOR
from millrace.demo.tasks import IMAGE, SIDE, TASKS, VIDEO, VISION_END, VISION_START, Task, Turn
from millrace.demo.tokenizer import byte_tokenizer

IGNORED = -100
"""The label of tokens without loss."""
Size = Literal["small", "grown"]
Family = Literal["qwen3", "qwen3.5", "qwen2.5-vl"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3.5", "qwen2.5-vl")
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
"""What a small Qwen3.5 has besides the sizes of a small Qwen3: one layer of GatedDeltaNet, and one that attends."""
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.05,
}
PATCHES: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": SIDE * SIDE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}
"""How the processor makes patches of a picture."""
SIZES: dict[Size, dict[str, Any]] = {
    "small": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        # The usual 0.02 suits wide layers; here it makes the warm-up slow.
        "initializer_range": 0.05,
    },
    "grown": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
LEARNING_RATES: dict[Size, float] = {"small": 2e-3, "grown": 5e-4}
"""Settings of the supervised run."""
Pixels = dict[str, torch.Tensor]
"""Arguments of a model for pictures: patches and the grid of each; empty without pictures."""
Demonstration = tuple[list[int], list[int]]
"""Token ids of a conversation, and its labels: the ids that the policy says, IGNORED for all others."""


@dataclass(frozen=True)
class WarmUp:
    """The supervised run."""

    seed: int = 0
    size: Size = "small"
    task: str = "reverse"
    model: Family = "qwen3"
    until: float = 0.12
    """Ends once the model gets new cases right with this probability; seeds take 175 to 275 steps for words."""
    look_every: int = 25
    max_steps: int = 1000
    samples: int = 64
    lr_warmup_steps: int = 20
    weight_decay: float = 0.01
    right: float = 0.3
    """Share of demonstrations that earn the reward."""


def made_model(folder: Path, warm_up: WarmUp) -> Path:
    """`folder` as a Hugging Face model folder; made only if it does not hold this very model yet."""
    recipe = folder / "recipe.json"
    if recipe.is_file() and json.loads(recipe.read_text()) == asdict(warm_up):
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    tokenizer = byte_tokenizer(TASKS[warm_up.task].tokens)
    model = warmed(tokenizer, warm_up)
    disable_progress_bar()
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    if warm_up.model == "qwen2.5-vl":
        (part / PROCESSOR).write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **PATCHES}))
    (part / "recipe.json").write_text(json.dumps(asdict(warm_up)))
    for file in part.iterdir():
        file.chmod(0o644)  # services in containers run as another user
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder


def random_model(tokenizer: PreTrainedTokenizerFast, size: Size = "small", family: Family = "qwen3") -> PreTrainedModel:
    """Random weights, float32."""
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token)),
        "pad_token_id": tokenizer.pad_token_id,
        **SIZES[size],
    }
    if family == "qwen2.5-vl":
        return _with_tower(tokenizer, shared)
    if family == "qwen3.5":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shared, **HYBRID))
    return Qwen3ForCausalLM(Qwen3Config(**shared))


def _with_tower(tokenizer: PreTrainedTokenizerFast, shared: dict[str, Any]) -> PreTrainedModel:
    """A Qwen2.5-VL whose language model has the sizes `shared`."""
    names = {"image": IMAGE, "video": VIDEO, "vision_start": VISION_START, "vision_end": VISION_END}
    ids: dict[str, Any] = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    section = shared["head_dim"] // 8
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [section, section * 3 // 2, section * 3 // 2],
    }
    text = {name: value for name, value in shared.items() if name not in ("tie_word_embeddings", "head_dim")}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**TOWER, "out_hidden_size": shared["hidden_size"]},
        tie_word_embeddings=True,
        **ids,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def warmed(tokenizer: PreTrainedTokenizerFast, warm_up: WarmUp) -> PreTrainedModel:
    """The model after the supervised run; the same seed gives the same weights on the same machine.

    Raises RuntimeError if it does not get there within `max_steps`.
    """
    torch.set_num_threads(1)  # the model is so small that threads would mostly wait for each other
    torch.manual_seed(warm_up.seed)
    rng = random.Random(warm_up.seed)
    task = TASKS[warm_up.task]
    source = task.cases(rng)
    unseen, of_unseen = drawn(task, source, tokenizer, rng, 128, right=1.0)
    model = random_model(tokenizer, warm_up.size, warm_up.model)
    if warm_up.size == "grown" and torch.cuda.is_available():
        torch.nn.Module.to(model, "cuda")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATES[warm_up.size], weight_decay=warm_up.weight_decay
    )
    steps = track(
        range(1, warm_up.max_steps + 1),
        f"warming up, until {warm_up.until:.0%} is right",
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    for step in steps:
        batch, shown = drawn(task, source, tokenizer, rng, warm_up.samples, right=warm_up.right)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[warm_up.size] * min(1.0, step / warm_up.lr_warmup_steps)
        optimizer.zero_grad()
        model(**_inputs(model, batch, shown)).loss.backward()
        optimizer.step()
        if step % warm_up.look_every == 0 and probability(model, unseen, of_unseen) >= warm_up.until:
            torch.nn.Module.to(model, "cpu")
            model.eval()
            return model
    raise RuntimeError(
        f"the model of seed {warm_up.seed} did not warm up in {warm_up.max_steps} steps: take another seed"
    )


def drawn(
    task: Task,
    cases: Iterator[str],
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    samples: int,
    *,
    right: float,
) -> tuple[list[Demonstration], Pixels]:
    """Demonstrations, of which the share `right` earns the reward, and their pictures."""
    made, files = list[Demonstration](), list[bytes]()
    for _ in range(samples):
        case = next(cases)
        turns = task.conversation(case, rng, right=right == 1 or rng.random() < right)
        made.append(demonstration(tokenizer, turns))
        if (file := task.picture(case)) is not None:
            files.append(file)
    return made, _pixels(files)


def _pixels(files: list[bytes]) -> Pixels:
    """What the tower takes of pictures, as the processor of the model folder makes it."""
    if not files:
        return {}
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor: Any = Qwen2VLImageProcessorPil(**PATCHES)
    images = [Image.open(io.BytesIO(file)) for file in files]
    return dict(processor(images=images, return_tensors="pt"))


def _inputs(model: PreTrainedModel, demonstrations: list[Demonstration], shown: Pixels) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward pass, with labels."""
    tokens_bt, labels_bt = _padded(demonstrations)
    inputs = {"input_ids": tokens_bt, "labels": labels_bt, **shown}
    if shown:
        inputs["mm_token_type_ids"] = (tokens_bt == model.config.image_token_id).int()
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def probability(model: PreTrainedModel, demonstrations: list[Demonstration], shown: Pixels | None = None) -> float:
    """Mean probability with which the model would say all that the policy says in a demonstration. `shown`: what the
    tower takes of their pictures."""
    inputs = _inputs(model, demonstrations, shown or {})
    labels_bt = inputs.pop("labels")
    with torch.no_grad():
        logprobs_btv = torch.log_softmax(model(**inputs).logits[:, :-1], dim=-1)
    answered_bt = labels_bt[:, 1:] != IGNORED
    chosen_bt = labels_bt[:, 1:].clamp(min=0)
    logprobs_bt = logprobs_btv.gather(-1, chosen_bt.unsqueeze(-1)).squeeze(-1)
    return float((logprobs_bt * answered_bt).sum(dim=1).exp().mean())


def demonstration(tokenizer: PreTrainedTokenizerFast, turns: Sequence[Turn]) -> Demonstration:
    """A conversation that ends with a turn of the policy, as tokens."""
    messages = [{"role": role, "content": text} for role, text in turns]
    tokens: list[int] = []
    labels: list[int] = []
    for number, (role, text) in enumerate(turns):
        if role == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
            said = tokenizer.encode(text + str(tokenizer.eos_token))
            labels += [IGNORED] * (len(prompt) - len(tokens)) + said
            tokens = [*prompt, *said]
    return tokens, labels


def _padded(batch: list[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64 [samples, longest]; padding carries no loss."""
    longest = max(len(tokens) for tokens, _ in batch)
    tokens_bt = torch.zeros((len(batch), longest), dtype=torch.int64)
    labels_bt = torch.full((len(batch), longest), IGNORED)
    for i, (tokens, labels) in enumerate(batch):
        tokens_bt[i, : len(tokens)] = torch.tensor(tokens)
        labels_bt[i, : len(tokens)] = torch.tensor(labels)
    return tokens_bt, labels_bt
