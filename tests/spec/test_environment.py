"""How many episodes share a process of an environment."""

from typing import Any

import pytest

from millrace.spec import parse, received
from millrace.spec.environment import Environment

JOB = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["/train.jsonl"]}}
PROGRAM = {"command": ["python3", "/tools.py"], "scope": "episode"}
SHARED = {"command": ["python3", "/tools.py"]}
ADDRESS = {"url": "http://tools:8000/mcp", "scope": "episode"}


def as_received(**fields: Any) -> Environment:
    """The environment of a job as a replica gets it: with every field."""
    spec = parse(JOB | {"rollout": {"environment": {"processes": 4, **fields}}})
    environment = received(spec.model_dump_json()).rollout.environment
    assert environment is not None and "episodes_per_process" in environment.model_fields_set
    return environment


@pytest.mark.parametrize(
    ("fields", "episodes"),
    [
        ({}, 32),
        ({"mcp": [SHARED, ADDRESS]}, 32),
        ({"mcp": [SHARED, PROGRAM]}, 1),
        ({"mcp": [PROGRAM], "episodes_per_process": 32}, 32),
        ({"episodes_per_process": 1}, 1),
    ],
)
def test_each_episode_with_a_program_of_its_own_has_a_process_unless_the_job_says_otherwise(
    fields: dict[str, Any], episodes: int
) -> None:
    environment = as_received(**fields)
    assert environment.episodes_of_process == episodes
    assert environment.episodes_at_once == 4 * episodes
