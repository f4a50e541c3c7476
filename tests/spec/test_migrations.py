"""Specs of earlier releases: those in the store, and files of users."""

import copy
import json

import pytest

from millrace.errors import InvalidJob
from millrace.spec import JobSpec, parse
from millrace.spec.migrations import migrated

JUDGE = {"url": "http://judge/v1", "model": "j", "prompt": "{{answer}}"}
OF_0_1 = {
    "name": "old",
    "output": "/out",
    "model": {"path": "/model"},
    "data": {"files": ["/train.parquet"]},
    "reward": {
        "functions": [{"name": "a", "function": "math"}, {"name": "b", "judge": JUDGE | {"api_key_env": "KEY"}}]
    },
}


def test_a_renamed_field_of_an_old_job_is_read_from_the_store_and_from_a_file() -> None:
    before = copy.deepcopy(OF_0_1)
    for spec in (JobSpec.model_validate_json(json.dumps(OF_0_1)), parse(OF_0_1)):
        judge = spec.reward.functions[1].judge
        assert judge is not None and judge.api_key == "env:KEY"
    assert before == OF_0_1  # what was given is not changed
    assert migrated(migrated(OF_0_1)) == migrated(OF_0_1)


def test_null_stays_null_and_odd_values_are_left_to_the_check() -> None:
    for value, told in ((None, None), (3, "reward.functions.0.judge.api_key: 3"), ("A-B", "api_key")):
        tree = OF_0_1 | {"reward": {"functions": [{"name": "b", "judge": JUDGE | {"api_key_env": value}}]}}
        if told is None:
            assert parse(tree).reward.functions[0].judge.api_key is None  # type: ignore[union-attr]
            continue
        with pytest.raises(InvalidJob, match=told):
            parse(tree)
    for odd in ({"reward": []}, {"reward": {"functions": {}}}, {"reward": {"functions": [3, {"judge": 4}]}}, {}):
        assert migrated(odd) == odd


def test_both_names_at_once_are_refused() -> None:
    both = JUDGE | {"api_key_env": "KEY", "api_key": "env:KEY"}
    with pytest.raises(InvalidJob, match=r"judge\.api_key_env"):
        parse(OF_0_1 | {"reward": {"functions": [{"name": "b", "judge": both}]}})


def test_a_key_of_a_tracker_that_takes_none_is_refused() -> None:
    with pytest.raises(InvalidJob, match=r"tracking\.api_key: \"env:KEY\": only wandb takes a key"):
        parse(OF_0_1 | {"tracking": {"trackers": ["jsonl"], "api_key": "env:KEY"}})
