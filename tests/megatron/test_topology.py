import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.topology import Topology


def test_tensor_parallel_neighbours_are_next_to_each_other_and_stages_furthest_apart():
    topology = Topology(16, MegatronOptions(tensor_parallel=2, context_parallel=2, pipeline_parallel=2))
    places = [topology.coordinates(rank) for rank in range(16)]
    assert topology.data_parallel == 2
    assert [place.tensor for place in places] == [0, 1] * 8
    assert [place.context for place in places] == [0, 0, 1, 1] * 4
    assert [place.data for place in places] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert [place.pipeline for place in places] == [0] * 8 + [1] * 8


def test_experts_divide_the_same_ranks_in_their_own_way():
    topology = Topology(
        8, MegatronOptions(tensor_parallel=2, pipeline_parallel=2, expert_parallel=2, expert_tensor_parallel=1)
    )
    places = [topology.coordinates(rank) for rank in range(8)]
    assert topology.expert_data_parallel == 2
    assert [place.expert for place in places] == [0, 1] * 4
    assert [place.expert_data for place in places] == [0, 0, 1, 1] * 2
    assert [place.pipeline for place in places] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("options", "layers", "expected"),
    [
        ({}, 4, [[[0, 1, 2, 3]]]),
        ({"pipeline_parallel": 2}, 4, [[[0, 1]], [[2, 3]]]),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2}, 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ({"pipeline_parallel": 3, "last_stage_layers": 1}, 5, [[[0, 1]], [[2, 3]], [[4]]]),
        ({"pipeline_parallel": 3, "first_stage_layers": 1, "last_stage_layers": 1}, 5, [[[0]], [[1, 2, 3]], [[4]]]),
        ({"pipeline_parallel": 2, "first_stage_layers": 1}, 4, [[[0]], [[1, 2, 3]]]),
        (
            {"pipeline_parallel": 3, "virtual_pipeline": 2, "last_stage_layers": 2},
            10,
            [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]],
        ),
    ],
)
def test_layers_go_to_stages_and_chunks_as_megatron_sends_them(options, layers, expected):
    topology = Topology(options.get("pipeline_parallel", 1), MegatronOptions(**options))
    stages, chunks = range(len(expected)), range(options.get("virtual_pipeline", 1))
    assert [[list(topology.layers_of(stage, chunk, layers)) for chunk in chunks] for stage in stages] == expected


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="6 ranks are not a multiple of 4"):
        Topology(6, MegatronOptions(tensor_parallel=4))
