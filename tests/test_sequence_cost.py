"""Costs, by hand."""

import pytest

from millrace.sequence_cost import AttentionLayer, SequenceCost, recurrence_by_layer


def test_linear_and_quadratic_parts():
    cost = SequenceCost(2.0, 0.5)
    assert cost.of(10) == 70
    assert cost.total([10, 2]) == 70 + 6


def test_equal_parts_are_a_cost_too():
    assert SequenceCost(1.0, 1.0).of(3) == 12


def test_a_model_without_windows():
    """Forward: 2 FLOPs a parameter and token; for each of s² / 2 pairs 2 for each element of query and value. Backward:
    twice that."""
    cost = SequenceCost.of_model(1000, [AttentionLayer(4 * 8, 4 * 6)] * 2)
    assert cost.of(3) == 3 * (2 * 1000 * 3 + 2 * (2 * 32 + 2 * 24) * 9 / 2)


@pytest.mark.parametrize("length", [4096, 32768])
@pytest.mark.parametrize("window", [1, 700, 4096, 20000, 40000])
def test_windows_count_the_pairs_inside(length, window):
    """Against the pairs one by one: token i sees min(i, window) tokens, itself included. The convention s² / 2 leaves
    out half of the first tokens' pairs with themselves."""
    cost = SequenceCost.of_model(0, [AttentionLayer(5, 3, window), AttentionLayer(2, 2)])
    pairs = sum(min(token, window) for token in range(1, length + 1)) - min(length, window) / 2
    whole = length * length / 2
    assert cost.of(length) == pytest.approx(6 * 8 * pairs + 6 * 4 * whole, rel=1e-9)


def test_layers_with_the_same_window_are_one_term():
    layers = [AttentionLayer(2, 2, 8), AttentionLayer(2, 2), AttentionLayer(2, 4, 8), AttentionLayer(1, 1, 4)]
    assert SequenceCost.of_model(1, layers).windows == ((4, 6.0), (8, 30.0))


GROUPED = {"num_attention_heads": 4, "hidden_size": 64}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8}
CONFIGS = [
    (GROUPED, AttentionLayer(64, 64)),
    ({**GROUPED, "head_dim": 32}, AttentionLayer(128, 128)),
    ({**GROUPED, **LATENT}, AttentionLayer(4 * 24, 4 * 12)),
    ({**GROUPED, "sliding_window": 8}, AttentionLayer(64, 64, 8)),
    ({**GROUPED, "sliding_window": 8, "use_sliding_window": False}, AttentionLayer(64, 64)),
    ({**GROUPED, "sliding_window": 8, "layer_types": ["", "sliding_attention"]}, AttentionLayer(64, 64, 8)),
    ({**GROUPED, "sliding_window": 8, "layer_types": ["", "full_attention"]}, AttentionLayer(64, 64)),
    ({**GROUPED, "num_attention_heads_per_layer": [1, 2], "head_dim": 16}, AttentionLayer(32, 32)),
]


@pytest.mark.parametrize(("config", "layer"), CONFIGS)
def test_attention_as_configs_state_it(config, layer):
    assert AttentionLayer.of_config(config, 1) == layer


@pytest.mark.parametrize("parts", [(0.0, 0.0), (-1.0, 2.0), (1.0, -0.1), (1.0, 0.0, ((8, -1.0),))])
def test_costs_that_order_nothing_are_refused(parts):
    with pytest.raises(ValueError, match="no positive cost"):
        SequenceCost(*parts)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 2}, ()),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ()),
        ({"layer_types": ["linear_attention", "full_attention"]}, (True, False)),
        ({"layer_types": ["full_attention"], "linear_num_value_heads": 4, "num_hidden_layers": 1}, ()),
        (
            {"full_attention_interval": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4},
            (True, False, True, False),
        ),
        ({"linear_num_value_heads": 4, "num_hidden_layers": 5}, (True, True, True, False, True)),
    ],
    ids=["dense", "kinds without", "kinds", "kinds count first", "interval", "usual interval"],
)
def test_layers_with_a_recurrence(config, expected):
    assert recurrence_by_layer(config) == expected
