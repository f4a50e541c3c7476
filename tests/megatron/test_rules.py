import json

import pytest

from millrace.admission import submission
from millrace.backends.megatron import MegatronOptions, parse
from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import broken_rules, check, check_adapter, check_submission
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, tensors
from millrace.spec import parse as parse_job
from millrace.spec import received
from millrace.spec.lora import Lora
from tests.lora.folders import write_folder
from tests.megatron import configs

FEW = {"num_hidden_layers": 5}
"""Layers of a model whose tensors are all looked at: those of 48 layers of 128 experts take seconds."""


def broken(config, options, ranks, folder, cuda=True):
    (folder / "config.json").write_text(json.dumps(config))
    return [str(mistake) for mistake in broken_rules(parse(options), read_shape(folder), ranks, cuda=cuda)]


# What the published tables of large-MoE runs ask for: model, ranks, TP, PP, EP, layers of the last stage.
@pytest.mark.parametrize(
    ("config", "ranks", "tensor", "stages", "experts", "last"),
    [
        (configs.DEEPSEEK_V3, 96, 8, 12, 8, 6),
        (configs.DEEPSEEK_V3, 128, 8, 16, 8, 1),
        (configs.DEEPSEEK_V3, 512, 1, 16, 32, 1),
        (configs.QWEN3_30B_A3B, 8, 1, 1, 8, None),
    ],
)
def test_the_published_configurations_are_taken(tmp_path, config, ranks, tensor, stages, experts, last):
    options = {
        "tensor_parallel": tensor,
        "pipeline_parallel": stages,
        "expert_parallel": experts,
        "expert_tensor_parallel": 1,
        "last_stage_layers": last,
    }
    assert broken(config, options, ranks, tmp_path) == []


def test_images_are_refused_in_a_model_with_experts(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    text = {**configs.QWEN3_NEXT, "model_type": "qwen3_5_moe_text", "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    shape = read_shape(tmp_path)
    check(parse({}), shape, None, cuda=True)
    with pytest.raises(InvalidJob, match=r"data\.images: .*with experts \(qwen3_5_moe\)"):
        check(parse({}), shape, None, cuda=True, images=True)


def test_a_share_of_the_optimizer_on_the_host_and_the_rest_of_it_between_updates(tmp_path):
    options = {"optimizer_offload_fraction": 0.5, "offload_optimizer": True}
    assert broken(configs.QWEN2, options, 1, tmp_path) == []


@pytest.mark.parametrize(
    ("config", "options", "ranks", "told"),
    [
        (configs.QWEN3_8B, {"tensor_parallel": 3}, 4, "tensor 3 · pipeline 1 · context 1 = 3 does not divide"),
        (configs.QWEN3_8B, {"tensor_parallel": 3}, 3, "attention heads, 32, do not divide by it"),
        (configs.QWEN2, {"tensor_parallel": 7}, 7, "neither divides the model's 2 key-value heads nor is a multiple"),
        (configs.QWEN3_8B, {"pipeline_parallel": 5}, 5, "36 layers = 36 do not divide evenly over 5 stages"),
        (configs.QWEN3_8B, {"pipeline_parallel": 2, "last_stage_layers": 36}, 2, "36 layers - 36 = 0 do not divide"),
        (configs.QWEN3_8B, {"pipeline_parallel": 2, "virtual_pipeline": 4}, 2, "18 layers, which do not divide into 4"),
        (configs.QWEN3_8B, {"virtual_pipeline": 2}, 1, "there is one pipeline stage"),
        (configs.QWEN3_8B, {"first_stage_layers": 2}, 1, "there is one pipeline stage"),
        (configs.QWEN3_8B, {"expert_parallel": 2}, 2, "qwen3 has no experts"),
        (configs.QWEN3_NEXT, {"tensor_parallel": 4}, 4, "cannot divide the gates of the model's 2 key-value heads"),
        (
            {**configs.QWEN3_NEXT, "linear_num_key_heads": 7, "linear_num_value_heads": 14},
            {"tensor_parallel": 2},
            2,
            "key heads of linear attention, 7, do not divide by it",
        ),
        (configs.QWEN3_NEXT, {"context_parallel": 2}, 2, "whose state runs through the whole sequence"),
        (configs.MIXTRAL, {"expert_parallel": 16}, 16, "the model has 8 experts a layer"),
        (configs.MIXTRAL, {"expert_parallel": 3}, 3, "the model's 8 experts do not divide by it"),
        (
            configs.QWEN3_30B_A3B,
            {"expert_parallel": 8},
            12,
            "expert 8 · pipeline 1 = 8 does not divide",
        ),
        (configs.MIXTRAL, {"tensor_parallel": 2, "sequence_parallel": False}, 2, "must split the tokens"),
        (configs.MIXTRAL, {"tensor_parallel": 2, "expert_tensor_parallel": 1}, 2, "without expert parallelism"),
        (configs.MIXTRAL, {"experts": {"aux_loss_coefficient": 0.1}}, 1, "load_balancing is none"),
        (configs.MIXTRAL, {"experts": {"bias_update_rate": 0.1}}, 1, "the routers of mixtral have no bias"),
        (
            configs.QWEN2,
            {"optimizer_offload_fraction": 0.5, "distributed_optimizer": False},
            1,
            "float32 weights in host",
        ),
        (configs.QWEN2, {"optimizer_moments": "bfloat16", "optimizer_offload_fraction": 0.5}, 1, "keeps them so"),
        (configs.QWEN2, {"recompute": {"granularity": "selective", "modules": ["moe"]}}, 1, "qwen2 has no experts"),
        (configs.QWEN2, {"recompute": {"granularity": "full", "layers": 25}}, 1, "a stage's chunk has about 24 layers"),
    ],
)
def test_what_cannot_run_is_refused_with_the_arithmetic_and_a_fix(tmp_path, config, options, ranks, told):
    rules = broken(config, options, ranks, tmp_path)
    assert any(told in rule for rule in rules), rules
    assert all(rule.startswith("trainer.backend_options.") and "Fix: " in rule for rule in rules)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"experts": {"dispatcher": "deepep"}}, "DeepEP needs a GPU"),
        ({"optimizer_offload_fraction": 0.5}, "no device memory to spare"),
        ({"optimizer_moments": "bfloat16"}, "needs a GPU"),
        ({"offload_optimizer": True}, "no device memory to spare"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(tmp_path, options, told):
    assert broken(configs.MIXTRAL, options, 2, tmp_path) == []
    (rule,) = broken(configs.MIXTRAL, options, 2, tmp_path, cuda=False)
    assert told in rule


def test_a_vocabulary_too_small_to_share_is_refused(tmp_path):
    (rule,) = broken({**configs.QWEN3_8B, "vocab_size": 60}, {"tensor_parallel": 8}, 8, tmp_path)
    assert "of 60 tokens, 16 to a rank, none would be left for the last rank" in rule


def test_every_broken_rule_is_told_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_8B))
    options = parse({"pipeline_parallel": 5, "expert_parallel": 2})
    with pytest.raises(InvalidJob, match=r"(?s)pipeline_parallel: 5: .*expert_parallel: 2: "):
        check(options, read_shape(tmp_path), 10, cuda=True)


def test_wrong_options_are_told_by_name_and_value():
    with pytest.raises(InvalidJob, match=r"tensor_parallel: 0: .*at least 1"):
        parse({"tensor_parallel": 0})
    with pytest.raises(InvalidJob, match=r"backend_options.tp: there is no such field. .*mean `tensor_parallel`"):
        parse({"tp": 2})
    with pytest.raises(InvalidJob, match=r"recompute: \"full\": .*`recompute: {granularity: full}`"):
        parse({"recompute": "full"})


def test_a_submitted_job_is_held_against_its_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.MIXTRAL))
    tree = {
        "name": "test",
        "output": str(tmp_path / "output"),
        "model": {"path": str(tmp_path)},
        "data": {"procedural": "reasoning_gym:spell_backward"},
        "trainer": {"backend": "megatron", "backend_options": {"expert_parallel": 16}},
    }
    with pytest.raises(InvalidJob, match=r"expert_parallel: 16: the model has 8 experts a layer"):
        submission.check(tree)


def stored(folder, shapes):
    """A folder with tensors of these shapes, as far as headers tell."""
    header = json.dumps({name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def test_a_stored_tensor_that_the_model_does_not_take_is_told_at_submission(tmp_path):
    config = {**configs.QWEN2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    taken = {tensor.name: list(tensor.shape) for tensor in tensors(shape, Topology(1, MegatronOptions()), LOCAL)}
    job = {"name": "test", "output": "/o", "model": {"path": str(tmp_path)}, "trainer": {"backend": "megatron"}}
    spec = received(
        parse_job({**job, "data": {"files": ["rows.jsonl"]}, "reward": {"function": "exact"}}).model_dump_json()
    )
    head, embedding = "lm_head.weight", taken["model.embed_tokens.weight"]
    known = {
        head: embedding,
        "model.layers.1.mlp.up_proj.weight": [1],
        "model.layers.0.self_attn.rotary_emb.inv_freq": [4],
    }
    stored(tmp_path, taken | known)
    check_submission(spec)
    stored(tmp_path, taken | {"model.layers.0.self_attn.o_proj.bias": [896]})
    with pytest.raises(InvalidJob, match=r"stores model\.layers\.0\.self_attn\.o_proj\.bias, for which the model of"):
        check_submission(spec)
    stored(tmp_path, taken | {head: [embedding[0] + 64, embedding[1]]})
    with pytest.raises(
        InvalidJob, match=r"lm_head\.weight with other values than model\.embed_tokens\.weight, to which"
    ):
        check_submission(spec)


def test_a_critic_of_another_folder_is_held_against_the_options_too(tmp_path):
    for name, config in (("policy", configs.MIXTRAL), ("critic", configs.QWEN2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    tree = {
        "name": "test",
        "output": str(tmp_path / "output"),
        "model": {"path": str(tmp_path / "policy")},
        "data": {"procedural": "reasoning_gym:spell_backward"},
        "trainer": {"backend": "megatron", "backend_options": {"tensor_parallel": 8}},
        "algorithm": {"preset": "ppo", "critic": {"path": str(tmp_path / "critic")}},
    }
    with pytest.raises(InvalidJob, match="the model's attention heads, 14, do not divide by it"):
        check_submission(parse_job(tree))
    tree["trainer"]["backend_options"] = {}
    head = {"lm_head.weight": [9], "score.weight": [1, 896], "score.bias": [1]}
    stored(tmp_path / "critic", head)
    check_submission(parse_job(tree))
    stored(tmp_path / "critic", head | {"model.layers.0.self_attn.o_proj.bias": [896]})
    with pytest.raises(
        InvalidJob, match=r"algorithm\.critic\.path: .* stores model\.layers\.0\.self_attn\.o_proj\.bias"
    ):
        check_submission(parse_job(tree))
    tree["algorithm"]["critic"]["path"] = str(tmp_path / "nothing")
    with pytest.raises(InvalidJob, match=r"algorithm\.critic\.path: .*config\.json cannot be read"):
        check_submission(parse_job(tree))


def test_what_a_job_with_an_adapter_cannot_have(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**configs.DEEPSEEK_V3, **FEW}))
    options = {"experts": {"bias_update_rate": 0.001}, "expert_parallel": 8, "offload_reference": True}
    tree = {
        "name": "test",
        "output": str(tmp_path / "output"),
        "model": {"path": str(tmp_path), "lora": {"rank": 32}},
        "data": {"procedural": "reasoning_gym:spell_backward"},
        "trainer": {"backend": "megatron", "backend_options": {"expert_parallel": 8}},
    }
    check_submission(parse_job(tree))
    tree["model"]["lora"] |= {"dora": True, "merge": True}
    tree["trainer"]["backend_options"] = options
    with pytest.raises(InvalidJob) as refused:
        check_submission(parse_job(tree))
    tree["model"]["lora"] = {"rank": 32, "merge": False, "target_modules": ["experts"]}
    tree["trainer"]["backend_options"] |= {"expert_tensor_parallel": 2}
    with pytest.raises(InvalidJob, match="adapters of experts need experts that are whole"):
        check_submission(parse_job(tree))
    fields = ["model.lora.dora", "offload_reference", "experts.bias_update_rate"]
    assert [mistake.field.removeprefix("trainer.backend_options.") for mistake in refused.value.mistakes] == fields


@pytest.mark.parametrize("config", [configs.DEEPSEEK_V3, configs.MOONLIGHT])
def test_latent_attention_in_parts_of_a_sequence_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = broken_rules(MegatronOptions(context_parallel=2), read_shape(tmp_path), None, cuda=True)
    assert [mistake.field for mistake in told] == ["trainer.backend_options.context_parallel"]
    assert "latent attention" in str(told[0])


@pytest.mark.parametrize("through_json", [False, True])
def test_the_layers_of_a_folder_are_held_against_the_rules(tmp_path, through_json):
    (tmp_path / "config.json").write_text(json.dumps({**configs.QWEN3_30B_A3B, **FEW}))
    inner = ["model.layers.0.mlp.experts.3.up_proj", "model.layers.0.self_attn.q_proj"]
    folder = write_folder(tmp_path / "adapter", {inner[0]: (2048, 768), inner[1]: (2048, 4096)})
    tree = {
        "name": "test",
        "output": str(tmp_path / "output"),
        "model": {"path": str(tmp_path), "lora": {"adapter_path": str(folder)}},
        "data": {"procedural": "reasoning_gym:spell_backward"},
        "trainer": {"backend": "megatron", "backend_options": {"expert_parallel": 8, "tensor_parallel": 4}},
    }
    tree["trainer"]["backend_options"]["expert_tensor_parallel"] = 2

    def told():
        spec = parse_job(tree)
        with pytest.raises(InvalidJob) as refused:
            check_submission(received(spec.model_dump_json()) if through_json else spec)
        return [mistake.field.removeprefix("trainer.backend_options.") for mistake in refused.value.mistakes]

    assert told() == ["model.lora.merge", "expert_tensor_parallel"]
    write_folder(tmp_path / "adapter", {inner[1]: (2048, 4096)}, use_dora=True)
    tree["model"]["lora"]["merge"] = True
    assert told() == ["model.lora.adapter_path"]
    write_folder(tmp_path / "adapter", {"model.layers.0.self_attn.qkv_proj": (2048, 4096)})
    assert told() == ["model.lora.adapter_path"]


@pytest.mark.parametrize(
    ("lora", "fields"),
    [
        ({"target_modules": ["linear_qkv", "experts", "linear_fc3"], "merge": True}, ["model.lora.target_modules"]),
        ({"exclude_modules": ["experts", "lm_head", "gate", "o_prj"]}, ["model.lora.exclude_modules"]),
        ({"exclude_modules": ["experts", "lm_head", "gate"]}, []),
        ({"target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "merge": True}, []),
        ({"target_modules": ["linear_qkv", "linear_fc1"], "merge": False}, ["model.lora.merge"]),
        ({"target_modules": ["linear_kv_up_proj"]}, ["model.lora.target_modules"]),
    ],
)
def test_names_of_layers_are_told_at_submission(tmp_path, lora, fields):
    (tmp_path / "config.json").write_text(json.dumps({**configs.QWEN3_30B_A3B, **FEW}))
    shape, lora = read_shape(tmp_path), Lora(**lora)
    if not fields:
        assert check_adapter(lora, MegatronOptions(), shape, LOCAL)
        return
    with pytest.raises(InvalidJob) as refused:
        check_adapter(lora, MegatronOptions(), shape, LOCAL)
    assert [mistake.field for mistake in refused.value.mistakes] == fields
