"""Models and options with which ranks cannot share a micro-batch are refused at submission."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.fsdp2.rules import check_submission
from millrace.fsdp2.sequence_parallel import FIELD
from millrace.spec import JobSpec, parse

DENSE: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 2}


def job(
    folder: Path,
    config: dict[str, Any],
    options: dict[str, Any],
    critic_config: dict[str, Any] | None = None,
    engine_options: dict[str, Any] | None = None,
    **roles: int,
) -> JobSpec:
    """A job with models of these configs, and sizes of its roles."""
    for name, written in (("model", config), ("critic", critic_config)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(written))
    critic = {} if critic_config is None else {"path": str(folder / "critic")}
    sizes = {role: {"backend_options": {"sequence_parallel_size": size}} for role, size in roles.items()}
    return parse(
        {
            "name": "long",
            "output": str(folder / "output"),
            "model": {"path": str(folder / "model")},
            "data": {"procedural": "reasoning_gym:spell_backward"},
            "rollout": {"engine_options": engine_options or {}},
            "algorithm": {"preset": "ppo", "kl_coefficient": 0.1, "critic": critic},
            "trainer": {"backend_options": options, **sizes},
        }
    )


@pytest.mark.parametrize(
    ("config", "options", "reasons"),
    [
        (DENSE, {"sequence_parallel_size": 8}, ["the model's 12 attention heads do not divide by it"]),
        (
            {**DENSE, "linear_num_value_heads": 4, "full_attention_interval": 4, "num_hidden_layers": 4},
            {"sequence_parallel_size": 4},
            [
                "the recurrence of the model's linear attention runs over whole sequences, which ranks would have "
                "slices of"
            ],
        ),
        ({"text_config": DENSE}, {"sequence_parallel_size": 5}, ["the model's 12 attention heads do not divide by it"]),
        (
            {"num_attention_heads_per_layer": [4, 8, 6, 6]},
            {"sequence_parallel_size": 4},
            ["the model's 6 attention heads do not divide by it"],
        ),
        (
            DENSE,
            {"sequence_parallel_size": 8, "attention": "sdpa"},
            [
                "sdpa attention cannot be divided over ranks",
                "the model's 12 attention heads do not divide by it",
            ],
        ),
    ],
)
def test_every_reason_is_told(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], reasons: list[str]
) -> None:
    with pytest.raises(InvalidJob) as refused:
        check_submission(job(tmp_path, config, options))
    assert [mistake.reason for mistake in refused.value.mistakes] == reasons
    assert {mistake.field for mistake in refused.value.mistakes} == {FIELD}


def test_the_critic_is_checked_too(tmp_path: Path) -> None:
    critic = {"num_attention_heads": 6}
    with pytest.raises(InvalidJob, match="the model's 6 attention heads"):
        check_submission(job(tmp_path, DENSE, {"sequence_parallel_size": 4}, critic))


def test_the_size_of_a_role_divides_that_of_the_policy(tmp_path: Path) -> None:
    spec = job(tmp_path, DENSE, {"sequence_parallel_size": 6}, reference=4, critic=3)
    with pytest.raises(InvalidJob) as refused:
        check_submission(spec)
    (mistake,) = refused.value.mistakes
    assert mistake.field == "trainer.reference.backend_options.sequence_parallel_size" and mistake.value == "4"
    assert mistake.reason == "the 6 ranks that share the policy's micro-batches do not divide into groups of 4"


@pytest.mark.parametrize("size", [1, 2, 12])
def test_more_ranks_than_key_value_heads_are_allowed(tmp_path: Path, size: int) -> None:
    options = {"sequence_parallel_size": size, "attention": "segments"}
    check_submission(job(tmp_path, {**DENSE, "rope_scaling": None}, options))
