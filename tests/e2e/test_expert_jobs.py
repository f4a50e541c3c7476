"""A job with a model of experts whose vLLM replicas have two data-parallel ranks each, with the experts over both: two
ranks of FSDP2 train it, and a second replica gets its weights from the first."""

import pytest

from tests.e2e.conftest import adds_up, finished, until
from tests.e2e.test_hybrid_jobs import CLOSE, SAME_VERSION, serving
from tests.models import byte_tokenizer
from tests.services.trainer.backends.megatron import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]
"""tests/services/rollout/engines/test_vllm_ranks.py holds the engine to Hugging Face."""


def test_replicas_of_two_ranks_generate_what_the_trainer_computes(start, another_replica, job, tmp_path):
    folder = tmp_path / "model"
    tiny.save("qwen3_moe", folder, served=True)
    byte_tokenizer().save_pretrained(folder)
    job["model"]["path"] = str(folder)
    options = {"max_num_seqs": 16, "data_parallel_size": 2, "kv_cache_memory_bytes": 1 << 27}
    job["rollout"] |= {"max_response_tokens": 60, "engine_options": options}
    job["schedule"] |= {"steps": 6, "prompts_per_step": 4, "max_staleness": 1}
    stack = start(replicas=1, ranks=2, engine="vllm")
    client = stack.client()
    view = client.submit(job)
    until("a step is trained", lambda: client.job(view.id).step >= 1, 400)
    client.pause(view.id)
    another_replica(stack, "vllm")
    until("the second replica serves", lambda: serving(client) == 2, 400)
    client.resume(view.id)
    done = finished(client, view.id, 400)
    adds_up(client, done, groups_per_step=4)
    rows = [row.values for row in client.metrics(view.id) if row.step]
    apart = [row[SAME_VERSION] for row in rows if SAME_VERSION in row]
    assert apart and max(apart) < CLOSE
    publications = [event.data for event in client.events(done.id, follow=False) if event.kind == "publication.done"]
    assert {report.source for report in publications} == {"trainer", "sibling"}
