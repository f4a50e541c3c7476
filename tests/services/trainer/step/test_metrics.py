"""The step's metrics."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from millrace.engines import ENGINE_NAMES
from millrace.sequence_cost import SequenceCost
from services.trainer.protocol.backend import Backend, DataParallel
from services.trainer.step.batch import BatchDivision, TrajectoryRef, division_metrics
from services.trainer.step.metrics import mismatch_by_part

VLLM, SGLANG = ENGINE_NAMES.index("vllm"), ENGINE_NAMES.index("sglang")


def test_what_two_engines_made_is_also_told_apart() -> None:
    train_bt = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
    mask_bt = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    shift_b = torch.tensor([0.0, 0.1, 0.1])
    engine_b, same_bt = torch.tensor([VLLM, SGLANG, SGLANG]), mask_bt.clone()
    same_bt[1] = False
    told = mismatch_by_part(train_bt, train_bt + shift_b[:, None], mask_bt, same_bt, engine_b)
    assert told["rollout_corr/kl/vllm"] == pytest.approx(0.0)
    assert told["rollout_corr/kl/sglang"] == pytest.approx(0.1)
    assert told["rollout_corr/kl"] == pytest.approx(0.05)  # three tokens of each
    assert told["rollout_corr/kl/same_version"] == pytest.approx(0.025)  # and one of SGLang's last one's weights
    assert told["rollout_corr/kl/same_version/sglang"] == pytest.approx(0.1)


@pytest.mark.parametrize("engine_b", [[VLLM, VLLM], [-1, -1], [VLLM, -1]])
def test_one_engine_needs_no_telling_apart(engine_b: list[int]) -> None:
    train_bt = torch.tensor([[-1.0], [-2.0]])
    told = mismatch_by_part(train_bt, train_bt, train_bt < 0, train_bt < 0, torch.tensor(engine_b))
    assert not [name for name in told if name.endswith(ENGINE_NAMES)]


def test_tokens_of_the_ranks_in_order_and_balanced() -> None:
    """As verl's: contiguous shares of the batch as it came, and the shares that the ranks train."""
    lengths = [10, 20, 30, 40, 5, 6]
    refs = tuple(
        TrajectoryRef(f"0-{number}", 0, number, number, 0, length, length) for number, length in enumerate(lengths)
    )
    division = BatchDivision(refs, {0: [[[0], [3]], [[1, 2]]], 1: [[[4]], [[5]]]}, token_budget=100)
    backend = SimpleNamespace(cost=SequenceCost(1.0, 0.0), data_parallel=DataParallel(0, 2, None))
    found = division_metrics([division], cast(Backend, backend))
    assert {name: value for name, value in found.items() if name.startswith("global_seqlen/")} == {
        "global_seqlen/min": 51.0,
        "global_seqlen/max": 60.0,
        "global_seqlen/minmax_diff": 9.0,
        "global_seqlen/balanced_min": 55.0,
        "global_seqlen/balanced_max": 56.0,
        "global_seqlen/mean": 55.5,
    }
