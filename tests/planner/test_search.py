"""Proposed layouts fit, are valid, and are in order."""

from itertools import pairwise

import pytest

from millrace.megatron.architectures.published import PUBLISHED
from millrace.memory.prediction import predict
from millrace.memory.text import fits
from millrace.planner.hardware import KINDS
from millrace.planner.plan import Cluster
from millrace.planner.search import (
    Bounds,
    Request,
    changed,
    counts,
    fewest,
    model_shape,
    proposals,
    stage_split,
    trainer_layouts,
)
from millrace.planner.workload import workload
from tests.planner.jobs import preset

H20 = KINDS["h20"]


def request(name: str = "qwen3-30b-a3b-8gpu", trainer_gpus: int = 4) -> Request:
    spec = preset(name)
    return Request(spec, model_shape(spec), Cluster(H20, trainer_gpus, 8), workload(spec))


def test_proposals_fit_and_the_fastest_is_first() -> None:
    asked = request()
    found = proposals(asked)
    steps = [(proposal.plan.least_s, proposal.plan.training_s) for proposal in found]
    assert len(found) >= 3 and steps == sorted(steps)
    for proposal in found:
        spec = changed(asked.spec, proposal.changes)
        assert proposal.plan.limits == [] and spec == proposal.plan.spec
        assert all(fits(ledger.total, H20.memory) for ledger in predict(spec, asked.shape, 4).values())


def test_the_bound_excludes_nothing_that_fits() -> None:
    class Unbounded(Bounds):
        def exceeded(self, changes: object) -> bool:
            return False

    asked = request(trainer_gpus=2)
    bounded = proposals(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace.planner.search.Bounds", Unbounded)
        assert [each.changes for each in proposals(asked)] == [each.changes for each in bounded]


def test_the_fewest_gpus_are_the_smallest_number_that_fits() -> None:
    asked = request()
    gpus = fewest(asked)
    assert proposals(asked.on(gpus)) and not proposals(asked.on(gpus // 2))


def test_the_numbers_that_are_tried_grow_and_end() -> None:
    tried = counts(8)
    assert tried[:6] == [1, 2, 4, 8, 16, 24] and {96, 128, 256, 512, 1024} <= set(tried)
    assert tried == sorted(set(tried)) and max(tried) == 1024
    assert all(after <= before * 9 / 8 for before, after in pairwise(tried[20:]))


def test_a_model_that_fits_no_replica_is_searched_for_no_trainer() -> None:
    small = H20.model_copy(update={"memory_gib": 4})
    asked = request()
    assert fewest(Request(asked.spec, asked.shape, Cluster(small, 8, 2), asked.work)) == 0


@pytest.mark.parametrize(("model", "stages"), [("deepseek-v3", 12), ("qwen3-235b-a22b", 8), ("qwen3-8b", 5)])
def test_stages_are_cut_such_that_the_last_one_has_room_for_the_head(model: str, stages: int) -> None:
    shape = PUBLISHED[model]
    split = stage_split(shape, stages)
    first, last = split["first_stage_layers"], split["last_stage_layers"]
    fixed = [size for size in (first, last) if size is not None]
    middle, rest = divmod(shape.layers - sum(fixed), stages - len(fixed))
    assert rest == 0 and middle >= 1
    assert (last or middle) <= middle


def test_layouts_follow_the_rules_of_the_backend() -> None:
    found = list(trainer_layouts(preset("qwen3-30b-a3b-8gpu"), PUBLISHED["qwen3-30b-a3b"], 8, H20))
    options = [{field.rpartition(".")[2]: value for field, value in each.items()} for each in found]
    sizes = {(each["tensor_parallel"], each["expert_parallel"]) for each in options}
    assert (1, 8) in sizes and (1, 16) not in sizes  # 16 do not divide 8 GPUs
    assert all(each["expert_parallel"] * each["pipeline_parallel"] <= 8 for each in options)
