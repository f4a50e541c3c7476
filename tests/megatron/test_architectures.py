import json
import subprocess
import sys

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.shape import Rope
from millrace.megatron.flops import active_parameters, sequence_cost
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


def test_planning_needs_neither_torch_nor_megatron():
    script = (
        "import sys, millrace.megatron.rules, millrace.megatron.weights, millrace.megatron.architectures;"
        "sys.exit(bool({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
