import json
import math
import time
from collections import defaultdict

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.architectures import read_shape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, TRANSFORMER_ENGINE, layout, tensors
from tests.megatron import configs

TOPOLOGIES = [
    (1, {}),
    (2, {"tensor_parallel": 2}),
    (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    (8, {"tensor_parallel": 4, "pipeline_parallel": 2}),
    (16, {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1}),
    (16, {"tensor_parallel": 4, "expert_parallel": 4, "context_parallel": 2}),
]


def small(config, **changes):
    return {**config, "num_hidden_layers": 4, "vocab_size": 1003, "first_k_dense_replace": 1, **changes}


CONFIGS = {
    "tied with two key-value heads": small(configs.QWEN2, num_attention_heads=16),
    "dense": small(configs.QWEN3_8B),
    "experts and one dense layer": small(configs.QWEN3_30B_A3B, num_experts=8, mlp_only_layers=[1]),
    "own names": small(configs.MIXTRAL),
    "latent attention and shared experts": small(configs.DEEPSEEK_V3, n_routed_experts=8),
    "latent attention with whole queries": small(configs.MOONLIGHT, n_routed_experts=8),
    "linear attention by key heads": small(configs.QWEN3_NEXT, num_experts=16, num_key_value_heads=4),
    "linear attention by projections": {
        **configs.QWEN3_5,
        "text_config": small(configs.QWEN3_5["text_config"], num_key_value_heads=4),
    },
}


@pytest.fixture(params=CONFIGS)
def shape(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return read_shape(tmp_path)


@pytest.mark.parametrize(("ranks", "options"), TOPOLOGIES)
@pytest.mark.parametrize("layers", [LOCAL, TRANSFORMER_ENGINE], ids=["local", "transformer_engine"])
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
def test_the_ranks_hold_every_number_once_and_every_copy_is_the_same_box(shape, critic, layers, ranks, options):
    shape = shape.as_critic() if critic else shape
    if shape.experts is None:
        options = {**options, "expert_parallel": 1, "expert_tensor_parallel": None}
    topology = Topology(ranks, MegatronOptions(**options))
    boxes = defaultdict(set)
    for rank in range(ranks):
        for placements in layout(shape, topology, rank, layers):
            for name, placement in placements.items():
                held = sum(math.prod(piece.extent) for piece in placement.pieces)
                padded = math.prod(placement.shape) - held
                assert padded == 0 or name in ("embedding.word_embeddings.weight", "output_layer.weight")
                for piece in placement.pieces:
                    boxes[piece.tensor].add((piece.source, piece.extent))
    assert set(boxes) == set(tensors(shape, topology, layers))
    for tensor, held in boxes.items():
        assert sum(math.prod(extent) for _, extent in held) == tensor.numel
        assert not any(overlap(a, b) for a in held for b in held if a < b)


def test_a_critic_has_a_head_of_one_row_in_the_place_of_the_logits(shape):
    policy, critic = (tensors(s, Topology(1, MegatronOptions()), LOCAL) for s in (shape, shape.as_critic()))
    assert {tensor for tensor in policy if tensor.name != "lm_head.weight"} < set(critic)
    (head,) = set(critic) - set(policy)
    assert (head.name, head.shape) == ("score.weight", (1, shape.hidden))


def overlap(a, b):
    return all(oa < ob + nb and ob < oa + na for oa, na, ob, nb in zip(*a, *b, strict=True))


def test_the_manifest_does_not_depend_on_the_topology_nor_on_the_layers(shape):
    alone = tensors(shape, Topology(1, MegatronOptions()), LOCAL)
    assert alone == tensors(
        shape, Topology(8, MegatronOptions(tensor_parallel=4, pipeline_parallel=2)), TRANSFORMER_ENGINE
    )
    assert len({tensor.name for tensor in alone}) == len(alone)
    assert ("lm_head.weight" in {tensor.name for tensor in alone}) is not shape.tied


def test_query_key_and_value_lie_group_by_group(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small(configs.QWEN3_8B)))
    shape, topology = read_shape(tmp_path), Topology(2, MegatronOptions(tensor_parallel=2))
    fused = layout(shape, topology, 1, LOCAL)[0]["decoder.layers.0.self_attention.linear_qkv.weight"]
    told = [(piece.tensor.name[-13:-12], piece.source[0] // 128, piece.target[0] // 128) for piece in fused.pieces[:4]]
    # The second of two ranks has groups 4 to 7: four query heads, one key head, one value head each.
    assert told == [("q", 16, 0), ("k", 4, 4), ("v", 4, 5), ("q", 20, 6)]


def test_gates_lie_after_the_query_heads_of_their_group(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small(configs.QWEN3_NEXT, num_experts=16)))
    shape, topology = read_shape(tmp_path), Topology(2, MegatronOptions(tensor_parallel=2))
    fused = layout(shape, topology, 1, LOCAL)[0]["decoder.layers.3.self_attention.linear_qkv.weight"]
    told = [(piece.tensor.name[-13:-12], piece.source[0] // 256, piece.target[0] // 256) for piece in fused.pieces]
    # The folder has each gate after its query head. The second rank has the second group: heads 8 to 15.
    queries, gates = ([("q", 16 + 2 * n + half, 8 * half + n) for n in range(8)] for half in (0, 1))
    assert told == [*queries, *gates, ("k", 1, 16), ("v", 1, 17)]


@pytest.mark.parametrize(
    "config", [CONFIGS["linear attention by key heads"], CONFIGS["linear attention by projections"]]
)
def test_a_rank_has_the_value_heads_of_its_key_heads(config, tmp_path):
    """Of each stored tensor, and of the convolution, whose sections are queries, keys and values."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, topology = read_shape(tmp_path), Topology(2, MegatronOptions(tensor_parallel=2))
    held = layout(shape, topology, 1, LOCAL)[0]
    convolved = held["decoder.layers.0.self_attention.conv1d.weight"]
    assert [(piece.source[0], piece.extent[0]) for piece in convolved.pieces] == [
        (1024, 1024),
        (3072, 1024),
        (6144, 2048),
    ]
    found = defaultdict(list)
    for piece in held["decoder.layers.0.self_attention.in_proj.weight"].pieces:
        found[piece.tensor.name.rpartition("in_proj_")[2]] += range(piece.source[0], piece.source[0] + piece.extent[0])
    if shape.recurrence.by_key_head:  # of 16 key heads the last 8, with all that belongs to them
        rows = {"qkvz.weight": range(12288 // 2, 12288), "ba.weight": range(32, 64)}
    else:
        qkv = [*range(1024, 2048), *range(3072, 4096), *range(6144, 8192)]
        rows = {"qkv.weight": qkv, "z.weight": range(2048, 4096), "b.weight": range(16, 32), "a.weight": range(16, 32)}
    assert {name: sorted(each) for name, each in found.items()} == {name: [*each] for name, each in rows.items()}


def test_the_layout_of_a_rank_of_deepseek_v3_takes_milliseconds(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.DEEPSEEK_V3))
    shape = read_shape(tmp_path)
    options = MegatronOptions(
        tensor_parallel=8, pipeline_parallel=16, expert_parallel=8, expert_tensor_parallel=1, last_stage_layers=1
    )
    topology = Topology(128, options)
    began = time.perf_counter()
    held = layout(shape, topology, 77, TRANSFORMER_ENGINE)
    assert len(held[0]) > 100
    assert time.perf_counter() - began < 20.0
