"""A job that learns from a teacher in a pool, from its submission to optimizer steps."""

import pytest

from tests.e2e.conftest import adds_up, finished
from tests.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]
STEPS = 10


@pytest.mark.parametrize("use_rewards", [False, True], ids=["alone", "beside the reward"])
def test_the_policy_comes_closer_to_its_teacher(use_rewards, with_transformers, client, another_replica, job, tmp_path):
    teacher = save_tiny_model(tmp_path / "teacher", tied=False, seed=9)
    held = {"name": "teacher", "path": str(teacher), "dtype": "float32", "engine_options": {"device": "cpu"}}
    loss = {"pool": "teacher", "loss": "forward_kl_topk", "top_k": 64, "use_rewards": use_rewards}
    job |= {"pools": [held], "algorithm": {"distillation": loss}}
    job["rollout"] |= {"max_response_tokens": 32, "engine_options": {"max_num_seqs": 16}}
    job["trainer"]["optimizer"] = {"lr": 3e-3}
    job["schedule"] |= {"steps": STEPS, "prompts_per_step": 4}
    another_replica(with_transformers, "transformers", "--pool", "teacher")
    done = finished(client, client.submit(job).id, 600)
    adds_up(client, done, groups_per_step=4)
    rows = [row.values for row in client.metrics(done.id) if row.step]
    losses = [row["distillation/loss"] for row in rows]
    assert len(losses) == STEPS and min(losses) > 0
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2]), losses
    kl = [row["distillation/kl"] for row in rows]
    assert sum(kl[-2:]) < sum(kl[:2]), kl
    assert all(row["actor/grad_norm"] > 0 and "critic/rewards/mean" in row for row in rows)
