"""Layouts of ranks over hosts: which cross them needlessly, and what would not."""

from itertools import product
from typing import Any

import pytest

from millrace.admission.advice import across_hosts
from millrace.backends.megatron import MegatronOptions
from millrace.descriptors import Hosts
from millrace.megatron.topology import Topology
from millrace.spec import JobSpec, parse


def job(backend: str, options: dict[str, Any]) -> JobSpec:
    return parse(
        {
            "name": "layout",
            "output": "/data/out",
            "model": {"path": "/data/model"},
            "data": {"files": ["/data/train.parquet"]},
            "trainer": {"backend": backend, "backend_options": options},
        }
    )


def told(backend: str, options: dict[str, Any], ranks: int, ranks_per_host: int) -> list[tuple[str, str]]:
    """The last name of each field, and its fix."""
    found = across_hosts(job(backend, options), ranks, ranks_per_host)
    return [(one.field.rpartition(".")[2], one.fix) for one in found]


@pytest.mark.parametrize(
    ("options", "ranks", "ranks_per_host", "wanted"),
    [
        ({"tensor_parallel": 8, "pipeline_parallel": 2}, 16, 8, []),
        ({"tensor_parallel": 16}, 16, 8, [("tensor_parallel", "give 8, and pipeline_parallel 2.")]),
        ({"tensor_parallel": 4}, 12, 6, [("tensor_parallel", "give 2, and pipeline_parallel 2.")]),
        (
            {"tensor_parallel": 4, "pipeline_parallel": 2},
            8,
            1,
            [("tensor_parallel", "give 1, and pipeline_parallel 8.")],
        ),
        ({"tensor_parallel": 4}, 8, 8, []),
        ({"tensor_parallel": 2, "context_parallel": 4}, 16, 8, []),
        (
            {"tensor_parallel": 4, "context_parallel": 4},
            16,
            8,
            [("context_parallel", "give tensor_parallel 2, and pipeline_parallel 2.")],
        ),
        ({"context_parallel": 16}, 32, 8, []),  # for long sequences there is no other way
        ({"expert_parallel": 8, "expert_tensor_parallel": 1, "tensor_parallel": 8, "pipeline_parallel": 12}, 96, 8, []),
        ({"expert_parallel": 32, "expert_tensor_parallel": 1, "pipeline_parallel": 16}, 512, 8, []),
        (
            {"tensor_parallel": 4, "expert_parallel": 8},
            32,
            8,
            [("expert_parallel", "give expert_tensor_parallel 1.")],
        ),
    ],
)
def test_megatron(options: dict[str, Any], ranks: int, ranks_per_host: int, wanted: list[tuple[str, str]]) -> None:
    assert told("megatron", options, ranks, ranks_per_host) == wanted


@pytest.mark.parametrize(
    ("options", "ranks", "ranks_per_host", "wanted"),
    [
        ({}, 8, 8, []),
        (
            {},
            32,
            8,
            [("fsdp_size", "give 8 if a GPU has room for 4 times the share of weights, gradients and optimizer.")],
        ),
        ({"fsdp_size": 8}, 32, 8, []),
        ({"fsdp_size": 4}, 32, 8, []),
        ({"fsdp_size": 16}, 32, 8, []),  # asked for: a copy over two whole hosts
        (
            {"fsdp_size": 12},
            24,
            8,
            [("fsdp_size", "give 8 if a GPU has room for 1.5 times the share of weights, gradients and optimizer.")],
        ),
        ({"fsdp_size": 8, "sequence_parallel_size": 8}, 16, 8, []),
        ({"fsdp_size": 8, "sequence_parallel_size": 16}, 16, 8, [("sequence_parallel_size", "give 8.")]),
    ],
)
def test_fsdp2(options: dict[str, Any], ranks: int, ranks_per_host: int, wanted: list[tuple[str, str]]) -> None:
    assert told("fsdp2", options, ranks, ranks_per_host) == wanted


def test_a_warning_is_a_whole_sentence_about_a_field() -> None:
    (warning,) = across_hosts(job("megatron", {"tensor_parallel": 16}), 32, 8)
    assert str(warning) == (
        "trainer.backend_options.tensor_parallel: 16: its ranks sum activations in every layer, and lie on several"
        " hosts of 8 ranks. Fix: give 8, and pipeline_parallel 2."
    )


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3, 4, 8])
def test_groups_cross_hosts_where_the_coordinates_of_their_ranks_say_so(ranks_per_host: int) -> None:
    """Against Megatron's coordinates of every rank, over small layouts."""
    for tensor, context, stages in product((1, 2, 4), (1, 2, 4), (1, 2)):
        options = MegatronOptions(tensor_parallel=tensor, context_parallel=context, pipeline_parallel=stages)
        topology = Topology(2 * options.ranks_of_a_model, options)
        hosts = Hosts(topology.world_size, ranks_per_host)
        at = [topology.coordinates(rank) for rank in range(topology.world_size)]
        tensor_groups: dict[tuple[int, ...], set[int]] = {}
        context_groups: dict[tuple[int, ...], set[int]] = {}
        for rank, one in enumerate(at):
            host = rank // ranks_per_host
            tensor_groups.setdefault((one.context, one.data, one.pipeline), set()).add(host)
            context_groups.setdefault((one.tensor, one.data, one.pipeline), set()).add(host)
        assert hosts.cross(tensor) == any(len(each) > 1 for each in tensor_groups.values())
        assert hosts.cross(context, tensor) == any(len(each) > 1 for each in context_groups.values())
