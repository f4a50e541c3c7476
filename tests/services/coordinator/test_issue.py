"""From rows to prompts that can be leased."""

import json
from pathlib import Path

import pytest

from millrace.data import open_source
from millrace.ids import PromptId
from millrace.wire.v1 import common_pb2, work_pb2
from services.coordinator.stages.issue import draft

DEEP = json.loads("[" * 800 + "]" * 800)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_source": "sums \ud83d"}, "half a character"),
        ({"prompt": "1 + 1 \ud83d"}, "half a character"),
        ({"prompt": [{"role": "user", "content": "\ud83d 1 + 1"}]}, "half a character"),
        ({"reward_model": {"ground_truth": ["2", "\ud83d"]}}, "half a character"),
        ({"extra_info": {"\ud83d": 1}}, "half a character"),
        ({"extra_info": {"deep": DEEP}}, "nested too deeply"),
    ],
)
def test_a_row_that_no_lease_can_carry_is_a_bad_one(changes: dict, reason: str, tmp_path: Path) -> None:
    good = {"data_source": "sums \U0001f642", "prompt": "1 + 1", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (good, good | changes)))
    source = open_source([tmp_path / "a.jsonl"])
    made = [
        draft(source, row, PromptId(f"0-{row}"), common_pb2.PURPOSE_TRAIN, work_pb2.Sampling(samples=2))
        for row in range(2)
    ]
    assert not made[0].reason and work_pb2.Lease.FromString(made[0].payload).data_source == "sums \U0001f642"
    assert made[1].reason.startswith("bad_row: row 1 ") and reason in made[1].reason and "Mend:" in made[1].reason
    assert made[1].reason.isascii() and not made[1].payload
