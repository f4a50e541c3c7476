"""A job whose trainer sends tokens to the experts that the engine sent them to."""

import pytest

from tests.e2e.conftest import adds_up, finished
from tests.models import byte_tokenizer
from tests.services.trainer.backends.megatron import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_experts_travel_from_the_engine_to_the_trainer(client, job, tmp_path):
    folder = tmp_path / "model"
    tiny.save("qwen3_moe", folder)
    byte_tokenizer().save_pretrained(folder)
    job["model"]["path"] = str(folder)
    job["algorithm"] = {"router_replay": True}
    job["trainer"]["backend"] = "megatron"
    job["rollout"] |= {"max_response_tokens": 24, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 3, "prompts_per_step": 4, "max_staleness": 0}
    view = client.submit(job)
    adds_up(client, finished(client, view.id), groups_per_step=4)
    rows = [row.values for row in client.metrics(view.id) if row.step]
    assert len(rows) == 3
    for values in rows:
        assert 0.9 < values["moe/replayed"] < 1.0, "all but the last token of each answer"
        assert values["training/rollout_logprobs_diff_max"] < 1e-3
