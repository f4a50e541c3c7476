import json
import subprocess
import sys

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.shape import Rope, active_parameters, sequence_cost
from millrace.megatron.topology import Topology
from millrace.megatron.weights import TRANSFORMER_ENGINE, tensors
from tests.megatron import configs


def shape_of(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def parameters(shape):
    return sum(tensor.numel for tensor in tensors(shape, Topology(1, MegatronOptions()), TRANSFORMER_ENGINE))


# Published sizes, in billions: all parameters (DeepSeek-V3 without its 11.5 of multi-token prediction), and those that
# a token meets, with the embedding that a published count has and ours has not.
@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (configs.QWEN2, 0.494, 0.494),
        (configs.QWEN3_8B, 8.19, 8.19),
        (configs.QWEN3_30B_A3B, 30.53, 3.34),
        (configs.MIXTRAL, 46.7, 12.88),
        (configs.DEEPSEEK_V3, 671.0, 37.5),
        (configs.MOONLIGHT, 15.96, 2.91),
    ],
)
def test_the_numbers_of_parameters_are_the_published_ones(tmp_path, config, total, active):
    shape = shape_of(config, tmp_path)
    assert parameters(shape) / 1e9 == pytest.approx(total, rel=0.005)
    embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
    assert (active_parameters(shape) + embedding) / 1e9 == pytest.approx(active, rel=0.015)


def test_attention_costs_the_square_of_a_sequence(tmp_path):
    cost = sequence_cost(shape_of(configs.QWEN3_8B, tmp_path))
    assert cost.per_token_pair == 6 * 36 * 32 * 128
    assert cost.of(2000) == 2 * cost.of(1000) + cost.per_token_pair * 2 * 1000 * 1000


def test_positions_are_read_in_the_old_words_and_the_new(tmp_path):
    old = shape_of(configs.DEEPSEEK_V3, tmp_path).rope
    new = {**configs.DEEPSEEK_V3, "rope_parameters": {"rope_theta": 10000, **configs.DEEPSEEK_V3["rope_scaling"]}}
    del new["rope_scaling"], new["rope_theta"]
    assert old == shape_of(new, tmp_path).rope == Rope(10000, "yarn", 40, 4096, 32, 1, 1.0, 1.0)


def _yarn(**entries):
    return {"rope_scaling": {**configs.DEEPSEEK_V3["rope_scaling"], **entries}}


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (configs.QWEN2, {"model_type": "gpt2"}, "'gpt2', which the megatron backend does not know"),
        (configs.QWEN2, {"use_sliding_window": True}, "use_sliding_window = True"),
        (configs.QWEN3_8B, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "cannot build rope_type 'dynamic'"),
        (configs.QWEN3_8B, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (configs.MIXTRAL, {"sliding_window": 4096}, "sliding_window = 4096"),
        (configs.DEEPSEEK_V3, {"topk_group": 8}, "would take the best 8 // 8 = 1"),
        (configs.DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (configs.MOONLIGHT, {"num_experts_per_tok": 1}, "normalises the weights of two experts or more"),
        (configs.QWEN3_30B_A3B, {"num_experts_per_tok": 1}, "normalises the weights of two experts or more"),
        (configs.MIXTRAL, {"num_experts_per_tok": 1}, "normalises the weights of two experts or more"),
        (configs.MIXTRAL, {"num_experts_per_tok": 9}, "8 experts, of which each token goes to 9"),
        (configs.DEEPSEEK_V3, {"n_group": 7}, "256 experts in 7 groups, of which 4 are chosen"),
        (configs.QWEN3_NEXT, {"mlp_only_layers": [3]}, "mlp_only_layers = [3]"),
        (configs.QWEN3_NEXT, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (configs.QWEN3_NEXT, {"layer_types": ["linear_attention"] * 48}, "layers are all of one kind"),
        (configs.QWEN3_5, {"tie_word_embeddings": True}, "tie_word_embeddings = False"),
        (configs.QWEN3_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (configs.DEEPSEEK_V3, _yarn(attention_factor=1.2), "attention_factor = 1.2"),
        (configs.DEEPSEEK_V3, _yarn(truncate=False), "truncate = False"),
        (configs.DEEPSEEK_V3, _yarn(mscale_all_dim=0, mscale=0.7), "mscale = 0.7"),
        (configs.DEEPSEEK_V3, _yarn(mscale=0), "mscale_all_dim = 1.0"),
    ],
)
def test_a_model_that_would_be_built_wrong_is_refused(tmp_path, config, change, told):
    with pytest.raises(InvalidJob, match=r"Fix: .*fsdp2") as refused:
        shape_of({**config, **change}, tmp_path)
    assert told in str(refused.value)


def test_a_folder_without_a_config_or_with_half_of_one_is_refused(tmp_path):
    with pytest.raises(InvalidJob, match="cannot be read"):
        read_shape(tmp_path)
    with pytest.raises(InvalidJob, match=r"does not say 'num_attention_heads'"):
        shape_of({"model_type": "qwen3"}, tmp_path)


@pytest.mark.parametrize(
    ("config", "entry"),
    [
        (configs.QWEN2, "num_key_value_heads"),
        (configs.QWEN3_8B, "head_dim"),
        *((configs.MOONLIGHT, e) for e in ("q_lora_rank", "n_group", "topk_group", "n_shared_experts")),
        (configs.MOONLIGHT, "routed_scaling_factor"),
    ],
)
def test_an_entry_for_which_transformers_takes_the_size_of_one_model_must_be_there(tmp_path, config, entry):
    with pytest.raises(InvalidJob, match=rf"does not say '{entry}'\. Fix: complete the config"):
        shape_of({name: value for name, value in config.items() if name != entry}, tmp_path)


@pytest.mark.parametrize(("config", "theta"), [(configs.QWEN3_8B, 1e4), (configs.MIXTRAL, 1e6)])
def test_without_a_base_of_the_positions_it_is_the_one_of_transformers(tmp_path, config, theta):
    import transformers

    without = {name: value for name, value in config.items() if name != "rope_theta"}
    assert shape_of(without, tmp_path).rope.theta == theta
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == theta


def test_one_expert_a_token_is_built_where_its_weight_is_the_router_s(tmp_path):
    config = {**configs.QWEN3_30B_A3B, "num_experts_per_tok": 1, "norm_topk_prob": False}
    experts = shape_of(config, tmp_path).experts
    assert (experts.per_token, experts.normalised) == (1, False)


def test_planning_needs_neither_torch_nor_megatron():
    script = (
        "import sys, millrace.megatron.rules, millrace.megatron.weights, millrace.megatron.architectures;"
        "sys.exit(bool({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
