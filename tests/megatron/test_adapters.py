"""The parts of adapters that ranks hold: together they are the adapters of the model folder's layers."""

import json
import math
from collections import defaultdict

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.adapters import adapted_linears, adapter_layout, linear_layers
from millrace.megatron.architectures import read_shape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, TRANSFORMER_ENGINE, layout
from tests.megatron.test_weights import CONFIGS, TOPOLOGIES

RANK = 5


@pytest.fixture(params=CONFIGS)
def shape(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return read_shape(tmp_path)


@pytest.mark.parametrize(("ranks", "options"), TOPOLOGIES[2:5])
@pytest.mark.parametrize(("layers", "without"), [(LOCAL, "none"), (TRANSFORMER_ENGINE, "k_proj")], ids=["all", "some"])
def test_the_ranks_hold_every_number_and_every_row_is_added_where_it_belongs(shape, layers, without, ranks, options):
    if shape.experts is None:
        options = {**options, "expert_parallel": 1, "expert_tensor_parallel": None}
    topology = Topology(ranks, MegatronOptions(**options))
    chosen = frozenset(name for name in linear_layers(shape, layers) if not name.endswith(without))
    boxes = defaultdict(set)
    for rank in range(ranks):
        base = layout(shape, topology, rank, layers)
        linears = adapted_linears(base, chosen)
        for chunk in adapter_layout(linears, RANK):
            for placement in chunk.values():
                (piece,) = placement.pieces
                assert piece.extent == placement.shape
                boxes[piece.tensor].add((piece.source, piece.extent))
        for parameters, adapted in zip(base, linears, strict=True):
            for linear in adapted:
                assert added_rows(linear) == rows(parameters[f"{linear.name}.weight"], chosen)
    assert {tensor.name.split(".lora_")[0] for tensor in boxes} == chosen
    for tensor, found in boxes.items():
        assert sum(math.prod(extent) for _, extent in found) == tensor.numel, tensor


def rows(placement, chosen):
    """For each row of a rank's weight the layer of the model folder that it belongs to, and its row there."""
    found = [None] * placement.shape[0]
    for piece in placement.pieces:
        layer = piece.tensor.name.removesuffix(".weight")
        if layer in chosen:
            for index in range(piece.extent[0]):
                found[piece.target[0] + index] = (layer, piece.source[0] + index)
    return found


def added_rows(linear):
    """The same of the rows that an adapter adds."""
    of_parts = [*((part.layer, row) for part in linear.parts for row in part.rows), None]
    return [of_parts[index] for index in linear.order]


def test_routers_experts_and_the_head_have_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["latent attention and shared experts"]))
    layers = linear_layers(read_shape(tmp_path), LOCAL)
    assert any("shared_experts.up_proj" in layer for layer in layers)
    assert not any("experts." in layer.replace("shared_experts.", "") or layer.endswith("mlp.gate") for layer in layers)
    assert "lm_head" not in layers
