"""Algorithms by name: what a preset holds, and that the user's own values take its place."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.admission import choices
from millrace.errors import InvalidJob
from millrace.spec import JobSpec, parse, presets

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
NAMES = ("cispo", "dapo", "dr_grpo", "gspo", "grpo", "ppo", "reinforce++", "rloo")


def job(algorithm: dict[str, Any], **parts: Any) -> JobSpec:
    tree = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
    return parse({**tree, "algorithm": algorithm, **parts})


@pytest.mark.parametrize("name", NAMES)
def test_each_is_valid_alone_and_survives_json(name: str) -> None:
    spec = job({"preset": name})
    choices.check(spec)
    assert spec.algorithm.preset == name
    assert parse(json.loads(spec.model_dump_json())) == spec


def test_these_are_all_and_each_has_its_row() -> None:
    assert presets.names() == tuple(sorted(NAMES))
    section = PAGE.split("\n## Presets", 1)[1].split("\n## ", 1)[0]
    assert sorted(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)) == sorted(NAMES)


def test_own_values_take_the_place_of_the_preset_s() -> None:
    preset = job({"preset": "dapo"}).algorithm
    assert preset.drop_groups_without_signal and preset.policy_loss.options == {"clip_low": 0.2, "clip_high": 0.28}
    own = job({"preset": "dapo", "drop_groups_without_signal": False, "policy_loss": {"options": {"clip_high": 0.3}}})
    assert own.algorithm.policy_loss.options == {"clip_low": 0.2, "clip_high": 0.3}
    assert not own.algorithm.drop_groups_without_signal and own.algorithm.aggregation == "token-mean"
    other = job({"preset": "dapo", "policy_loss": {"name": "cispo"}})
    assert other.algorithm.policy_loss.model_dump() == {"name": "cispo", "options": {}}
    assert parse(json.loads(other.model_dump_json())) == other
    same = job({"preset": "dr_grpo", "advantage": "grpo", "policy_loss": "cispo"}).algorithm
    assert same.advantage.options == {"std": False} and same.policy_loss.options == {}
    critic = job({"preset": "ppo", "critic": {"warmup_steps": 3}}).algorithm.critic
    assert critic is not None and critic.clip == 0.5 and critic.warmup_steps == 3


def test_without_its_kl_a_preset_says_nothing_of_kl() -> None:
    algorithm = job({"preset": "ppo", "kl": None}).algorithm
    assert algorithm.kl is None and algorithm.kl_in == "loss"


def test_one_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidJob, match=r"algorithm\.preset: \"pppo\": .*one of cispo, dapo, dr_grpo"):
        job({"preset": "pppo"})


def test_presets_do_what_their_papers_say() -> None:
    assert job({"preset": "grpo"}).algorithm.kl_in == "loss"
    assert job({"preset": "dr_grpo"}).algorithm.advantage.options == {"std": False}
    assert job({"preset": "gspo"}).algorithm.aggregation == "seq-mean-token-mean"
    for name in ("rloo", "reinforce++", "ppo"):
        assert job({"preset": name}).algorithm.kl_in == "reward"
