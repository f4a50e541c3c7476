import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.data.chat import render
from millrace.data.model_folder import check_model_folder
from millrace.data.pictures import Pictures
from millrace.demo.model import IGNORED, WarmUp, demonstration, drawn, made_model, probability, random_model, warmed
from millrace.demo.tasks import TASKS
from millrace.demo.tokenizer import byte_tokenizer

SHORT = WarmUp(seed=1, until=0.0, look_every=3, samples=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_model(tmp_path_factory.mktemp("demo") / "model", SHORT)


def test_every_text_is_one_token_a_byte_and_decodes_to_itself() -> None:
    tokenizer = byte_tokenizer()
    text = "reverse abc\n Grüße, 水車 \t!"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode()) and tokenizer.decode(tokens) == text
    assert len(tokenizer) == 259


def test_the_folder_is_an_ordinary_hugging_face_model(folder: Path) -> None:
    assert check_model_folder(folder).architecture == "Qwen3ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "reverse abc"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nreverse abc<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(p.numel() for p in model.parameters()) == 427_136
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_qwen3_5_has_a_layer_of_each_kind() -> None:
    model = random_model(byte_tokenizer(), family="qwen3.5")
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert sum(p.numel() for p in model.parameters()) == 461_928


def test_pictures_are_warmed_as_a_job_shows_them(tmp_path: Path) -> None:
    """Tokens and patches of a demonstration are those that replicas and trainer make of the row."""
    look = TASKS["look"]
    folder = made_model(tmp_path / "model", replace(SHORT, task="look", model="qwen2.5-vl"))
    assert check_model_folder(folder).architecture == "Qwen2_5_VLForConditionalGeneration"
    tokenizer, pictures = AutoTokenizer.from_pretrained(folder), Pictures.of_folder(str(folder))
    case = next(look.cases(random.Random(3)))
    (batch,), shown = drawn(look, iter([case]), tokenizer, random.Random(0), 1, right=1.0)
    rendered = render(look.row(0, case), tokenizer, max_tokens=48, pictures=pictures)
    said = [label for label in batch[1] if label != IGNORED]
    assert batch[0] == [*rendered.token_ids, *said]
    assert tokenizer.decode(said) == f"{look.row(0, case).ground_truth}<|im_end|>"
    patches, grid = pictures.pixels(rendered.images)
    torch.testing.assert_close(shown["pixel_values"], patches, atol=1e-6, rtol=0)
    assert torch.equal(shown["image_grid_thw"], grid)


def test_a_model_of_the_same_recipe_is_kept_and_of_another_made_anew(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    made_model(folder, SHORT)
    assert weights.stat().st_mtime_ns == before
    (folder / "recipe.json").write_text('{"seed": 2}')
    same = weights.read_bytes()
    made_model(folder, SHORT)
    assert weights.stat().st_mtime_ns > before
    assert weights.read_bytes() == same  # the same seed gives the same weights


def test_a_warm_up_that_does_not_get_there_says_so() -> None:
    with pytest.raises(RuntimeError, match="seed 1 did not warm up in 2 steps"):
        warmed(byte_tokenizer(), replace(SHORT, until=1.0, look_every=1, max_steps=2))


def test_the_probability_is_that_of_the_whole_answer() -> None:
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer).eval()
    prompt, said = tokenizer.encode("reverse ab\n"), tokenizer.encode("ba<|im_end|>")
    said_after = [IGNORED] * len(prompt) + said
    expected = 1.0
    for i, token in enumerate(said):
        logits = model(torch.tensor([[*prompt, *said[:i]]])).logits[0, -1].detach()
        expected *= float(torch.softmax(logits.double(), -1)[token])
    longer = ([*prompt, *prompt, *said], [IGNORED] * 2 * len(prompt) + said)
    assert probability(model, [([*prompt, *said], said_after)]) == pytest.approx(expected, rel=1e-4)
    mean = (expected + probability(model, [longer])) / 2
    assert probability(model, [([*prompt, *said], said_after), longer]) == pytest.approx(mean, rel=1e-4)


def test_the_warm_up_moves_the_weights(folder: Path) -> None:
    torch.manual_seed(SHORT.seed)
    fresh = random_model(byte_tokenizer())
    warm = AutoModelForCausalLM.from_pretrained(folder)
    assert (fresh.model.embed_tokens.weight - warm.model.embed_tokens.weight).abs().max() > 1e-4


def test_the_policy_s_turns_of_a_conversation_are_trained_and_nothing_else() -> None:
    hunt = TASKS["hunt"]
    tokenizer = byte_tokenizer(hunt.tokens)
    turns = hunt.conversation("gc fab", random.Random(0), right=True)
    tokens, labels = demonstration(tokenizer, turns)
    assert [role for role, _ in turns] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    said = "".join(f"{text}<|im_end|>" for role, text in turns if role == "assistant")
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == said
    assert len(tokens) == len(labels) and all(b in (a, IGNORED) for a, b in zip(tokens, labels, strict=True))
    whole = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in turns], tokenize=False)
    assert tokenizer.decode(tokens) + "\n" == whole, "the policy is warmed on what the chat template makes of it"
