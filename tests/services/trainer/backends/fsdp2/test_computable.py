"""Each architecture packed gives what it gives alone in transformers, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.errors import InvalidJob
from millrace.spec.model import Model
from services.trainer.backends import build
from services.trainer.backends.fsdp2 import model_check
from services.trainer.backends.fsdp2.attention import SEGMENTS
from services.trainer.backends.fsdp2.computable import check_computable
from services.trainer.backends.fsdp2.model import load_config
from services.trainer.backends.recurrence import Segments
from tests.services.trainer.groups import job_spec

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GEMMA = {**HEADS, "query_pre_attn_scalar": 16, "sliding_window": 8}
RIGHT: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, **EXPERTS, "num_experts": 4},
    "llama": {},
    "mistral": {**HEADS, "sliding_window": 8},
    "mixtral": {**HEADS, "num_local_experts": 4, "router_jitter_noise": 0.1},
    "gemma3_text": GEMMA,
    "glm4_moe": {**HEADS, **EXPERTS, "n_routed_experts": 4},
    "olmo3": {"sliding_window": 8},
    "cohere2": {"sliding_window": 8},
    "phi3": {},
    "gpt2": {},
    "deepseek_v3": {
        **LATENTS,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
WRONG: dict[str, dict[str, Any]] = {
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {**HEADS, "num_local_experts": 2, "num_hidden_layers": 4},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "bloom": {},
    "falcon": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "granitemoehybrid": {},
    "bamba": {},
    "falcon_h1": {},
    "jamba": {},
    "minimax": HEADS,
    "stablelm": {},
    "nemotron": HEADS,
    "glm_moe_dsa": {**LATENTS, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1},
    "mimo_v2_flash": {**HEADS, **EXPERTS, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
}


def saved_config(kind: str, options: dict[str, Any], folder: Path) -> Path:
    AutoConfig.for_model(kind, **{**SIZES, **options}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", RIGHT)
def test_packed_is_what_each_is_alone(kind: str, tmp_path: Path) -> None:
    """The packed model is in training mode, which has noise and dropout."""
    folder, lengths = saved_config(kind, RIGHT[kind], tmp_path / kind), [13, 21, 9]
    torch.manual_seed(0)
    alone = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    config = load_config(Model(path=str(folder)))
    packed = AutoModelForCausalLM.from_config(config, attn_implementation=SEGMENTS).train()
    check_computable(packed, SEGMENTS, str(folder), "model.path")
    packed.load_state_dict(alone.state_dict())
    tokens = torch.randint(0, 300, (sum(lengths),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        expected = torch.cat([alone(input_ids=part[None]).logits[0] for part in tokens.split(lengths)])
        found = packed(
            input_ids=tokens[None],
            position_ids=positions[None],
            segments=Segments.of(lengths, torch.device("cpu")),
            use_cache=False,
        ).logits[0]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", WRONG)
def test_what_would_be_another_model_is_refused(kind: str, one_rank: torch.device, tmp_path: Path) -> None:
    folder = saved_config(kind, WRONG[kind], tmp_path / kind)
    spec = job_spec(folder, trainer={"backend_options": {"attention": "segments"}})
    with pytest.raises(InvalidJob, match=r"model\.path: .*" + kind) as raised:
        build(spec, one_rank)
    assert raised.value.fix and "safetensors" not in str(raised.value)


def test_the_fix_names_what_computes_the_model(one_rank: torch.device, tmp_path: Path) -> None:
    folder = saved_config("stablelm", {}, tmp_path / "stablelm")
    with pytest.raises(InvalidJob, match="does not tell its attention where sequences begin") as raised:
        build(job_spec(folder), one_rank)
    assert '"flash_attention_2" or "sdpa"' in raised.value.fix
    model_check.check(job_spec(folder, trainer={"backend_options": {"attention": "sdpa"}}))


def test_so_is_the_critics(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    folder = saved_config("lfm2", WRONG["lfm2"] | {"vocab_size": 259}, tmp_path / "lfm2")
    spec = job_spec(tied_model, algorithm={"preset": "ppo", "critic": {"path": str(folder)}})
    with pytest.raises(InvalidJob, match=r"algorithm\.critic\.path: .*its architecture is lfm2") as raised:
        build(spec, one_rank)
    assert raised.value.fix
    with pytest.raises(InvalidJob, match=r"algorithm\.critic\.path: .*its architecture is lfm2"):
        model_check.check(spec)
    with pytest.raises(InvalidJob) as both:
        model_check.check(spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(folder)})}))
    assert [mistake.field for mistake in both.value.mistakes] == ["model.path", "algorithm.critic.path"]


def test_where_ranks_share_micro_batches_flash_attn_does_not_help(tmp_path: Path) -> None:
    folder = saved_config("gemma2", WRONG["gemma2"], tmp_path / "gemma2")
    model_check.check(job_spec(folder))
    shared = {"backend_options": {"sequence_parallel_size": 2}}
    with pytest.raises(InvalidJob, match=r"varlen attention, which leaves out its softcap, differs by .* nats"):
        model_check.check(job_spec(folder, trainer=shared))


def test_torchs_own_attention_leaves_out_softcapping_too(one_rank: torch.device, tmp_path: Path) -> None:
    folder = saved_config("gemma2", WRONG["gemma2"], tmp_path / "gemma2")
    spec = job_spec(folder, trainer={"backend_options": {"attention": "sdpa"}})
    with pytest.raises(InvalidJob, match=r"sdpa attention, differs by .* nats") as raised:
        build(spec, one_rank)
    assert "flash_attention_2" in raised.value.fix
