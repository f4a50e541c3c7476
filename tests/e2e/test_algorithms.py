"""A job of one step for estimators with their natural loss, through all services.

`make test` has those that ask something of the other services. A real step with every other one is taken by
tests/services/trainer/step/test_every_algorithm.py.
"""

import math

import pytest

from millrace.rl.registry.catalogue import AlgorithmKind, names
from tests.e2e.conftest import adds_up, finished
from tests.services.trainer.step.test_every_algorithm import ESTIMATORS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    vowels = sum(letter in ground_truth for letter in solution_str)
    return {"score": vowels / max(1, len(solution_str)), "short": float(len(solution_str) < 12)}
"""


COVERING = ("gdpo", "remax")
"""Rewards in parts, greedy answers. Jobs of other files have the usual one; a critic is the trainer's alone:
tests/services/trainer/step/test_critic.py."""
REST = tuple(name for name in names(AlgorithmKind.ADVANTAGE) if name not in COVERING)


@pytest.mark.parametrize(
    "estimators", [COVERING, pytest.param(REST, marks=pytest.mark.matrix)], ids=["covering", "rest"]
)
def test_estimators_train_a_step(estimators, client, job, tmp_path):
    (tmp_path / "two.py").write_text(REWARD)
    job["rollout"] |= {"max_response_tokens": 16, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 1, "prompts_per_step": 4, "max_staleness": 0}
    submitted = {}
    for name in estimators:
        algorithm = {"advantage": {"name": name}, **ESTIMATORS.get(name, {})}
        parts = ["score", "short"] if name == "gdpo" else []
        reward = {"function": f"{tmp_path / 'two.py'}:compute_score", "workers": 1, "parts": parts}
        own = {"name": name, "output": str(tmp_path / name), "algorithm": algorithm, "reward": reward}
        submitted[name] = client.submit({**job, **own}).id
    for name, job_id in submitted.items():
        adds_up(client, finished(client, job_id), groups_per_step=4)
        values = client.metrics(job_id)[-1].values
        assert all(math.isfinite(value) for value in values.values()), (name, values)
        assert values["actor/grad_norm"] >= 0 and values["critic/advantages/max"] >= values["critic/advantages/min"]
