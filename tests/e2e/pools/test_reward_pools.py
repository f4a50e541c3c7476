"""A job whose reward comes from a function, a reward model and a judge, each of the two on a replica of its own."""

import pytest

from millrace.drops import DropReason
from millrace.rest import WaitingFor
from tests.e2e.conftest import adds_up, finished, until
from tests.models import save_judge_model, save_reward_model

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]


def waits_for_pool(view):
    return view.waiting if view.waiting is not None and view.waiting.reason is WaitingFor.POOL else None


def test_a_reward_model_and_a_judge_score_in_one_job(with_transformers, client, another_replica, job, tmp_path):
    """The job says which pool it waits for, before both have a replica and after the only one of a pool was killed. No
    group is lost."""
    on_cpu = {"dtype": "float32", "engine_options": {"device": "cpu"}}
    job["pools"] = [
        {"name": "quality", "path": str(save_reward_model(tmp_path / "reward")), **on_cpu},
        {"name": "judge", "path": str(save_judge_model(tmp_path / "judge")), **on_cpu},
    ]
    judge = {"pool": "judge", "prompt": "Question: {{prompt}}\nAnswer: {{answer}}", "scale": [0, 10]}
    vowels = {"name": "vowels", "function": job["reward"]["function"]}
    liked = {"name": "liked", "pool": "quality", "weight": 0.1}
    job["reward"] = {"functions": [vowels, liked, {"name": "judged", "judge": judge, "weight": 0.5}], "workers": 1}
    job["rollout"] |= {"max_response_tokens": 16, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 6, "prompts_per_step": 4}
    view = client.submit(job)
    waiting = until("the job waits for a pool", lambda: waits_for_pool(client.job(view.id)), 240)
    assert "start one with --pool" in waiting.message
    started = {
        pool: another_replica(with_transformers, "transformers", "--pool", pool) for pool in ("quality", "judge")
    }
    until("a step is trained", lambda: client.job(view.id).step >= 1, 240)
    started["quality"].kill()
    waiting = until("the job waits for the killed one", lambda: waits_for_pool(client.job(view.id)), 240)
    assert "quality" in waiting.message
    another_replica(with_transformers, "transformers", "--pool", "quality")
    done = finished(client, view.id, 600)
    adds_up(client, done, groups_per_step=4)
    assert DropReason.REWARD_FAILED not in client.ledger(view.id).reasons
    rows = [row.values for row in client.metrics(view.id) if row.step]
    assert len(rows) == 6
    for row in rows:
        assert [row[f"rewards/judged/{which}"] for which in ("min", "mean", "max")] == pytest.approx([0.7] * 3)
        assert row["rewards/liked/max"] > row["rewards/liked/min"], "a random reward model tells answers apart"
        parts = row["rewards/vowels/mean"] + 0.1 * row["rewards/liked/mean"] + 0.5 * 0.7
        assert row["critic/rewards/mean"] == pytest.approx(parts, abs=1e-4)
        assert row["actor/grad_norm"] > 0
    details = [sample.details for sample in client.samples(view.id)]
    assert details and all(each["judged_reply"] == "Score: 7" for each in details)
    replicas = {member.pool: member for member in client.fleet().replicas}
    assert {"quality", "judge"} < set(replicas) and replicas["judge"].sessions_address
