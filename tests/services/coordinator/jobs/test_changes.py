"""Changes of a spec that is continued."""

import pytest

from millrace.errors import InvalidJob
from services.coordinator.jobs.control import applied, gives_token_budget

TREE = {
    "name": "job",
    "rollout": {"engine_options": {"vllm": {"max_num_sqs": 8, "enforce_eager": True}, "seed": 1}, "dtype": "bfloat16"},
    "trainer": {"token_budget": 8192, "backend_options": {"tensor_parallel": 2}},
    "schedule": {"steps": 10, "save_every_steps": 5},
}


def test_what_is_not_named_stays_and_null_takes_an_option_out() -> None:
    changes = {"rollout": {"engine_options": {"vllm": {"max_num_sqs": None, "max_num_seqs": 8}}}}
    changed, anew = applied(TREE, changes)
    assert not anew
    assert changed["rollout"]["engine_options"] == {"vllm": {"enforce_eager": True, "max_num_seqs": 8}, "seed": 1}
    assert {name: part for name, part in changed.items() if name != "rollout"} == {
        name: part for name, part in TREE.items() if name != "rollout"
    }
    assert TREE["rollout"]["engine_options"]["vllm"] == {"max_num_sqs": 8, "enforce_eager": True}  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({"schedule": {"save_every_steps": 1}}, False),
        ({"schedule": {"save_every_steps": 1, "steps": None}}, True),
        ({"trainer": {"backend_options": {"tensor_parallel": None}}}, True),
        ({"deadlines": {"step_s": 5.0}, "tracking": {"trackers": []}}, False),
    ],
)
def test_the_trainer_loads_anew_what_concerns_it(changes: dict[str, dict[str, object]], anew: bool) -> None:
    changed, found = applied(TREE, changes)
    assert found == anew
    if "steps" in changes.get("schedule", {}):
        assert changed["schedule"]["steps"] is None
    if "trainer" in changes:
        assert changed["trainer"] == {"token_budget": 8192, "backend_options": {}}


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"trainer": {"token_budget": 8192}}, True),
        ({"trainer": {"reference": {"token_budget": None}}}, True),
        ({"trainer": {"critic": {"token_budget": 16384}}, "schedule": {"steps": 3}}, True),
        ({"trainer": {"optimizer": {"lr": 1e-6}, "reference": {"backend_options": {"token_budget": 1}}}}, False),
        ({}, False),
    ],
)
def test_a_token_budget_among_the_changes(changes: dict[str, object], given: bool) -> None:
    assert gives_token_budget(changes) == given


@pytest.mark.parametrize(
    "changes", [{"name": "other"}, {"rollout": {"dtype": "float32"}}, {"rollout": 3}, {"model": {}}]
)
def test_other_fields_have_to_stay(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidJob, match="a job that is continued keeps it"):
        applied(TREE, changes)
