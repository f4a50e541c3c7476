"""The pools of a job spec: what is refused, with the field, and what the folders of their models have to be."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.admission import choices
from millrace.admission.pools import check_pool
from millrace.errors import InvalidJob
from millrace.spec import parse
from millrace.spec.pool import Pool, PoolTask

JOB = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["/train.jsonl"]}}
QUALITY, TEACHER = {"name": "quality", "path": "/reward-model"}, {"name": "teacher", "path": "/teacher"}
LIKED = {"name": "liked", "pool": "quality"}
JUDGED = {"name": "judged", "judge": {"pool": "quality", "prompt": "{{answer}}"}}


def judged(**fields: Any) -> dict[str, Any]:
    """A job with a judge in a pool, and these fields of the judge."""
    judge = {**JUDGED, "judge": {"pool": "quality", "prompt": "{{answer}}", **fields}}
    return {"pools": [QUALITY], "reward": {"functions": [judge]}}


def test_a_job_uses_each_pool_for_one_task() -> None:
    spec = parse(
        JOB
        | {"pools": [QUALITY, TEACHER], "reward": {"functions": [LIKED]}}
        | {"algorithm": {"distillation": {"pool": "teacher"}}}
    )
    assert spec.pool_tasks("quality") == {PoolTask.REWARDS} and spec.pool_tasks("teacher") == {PoolTask.LOGPROBS}
    assert [term.pool for term in spec.reward.pool_terms] == ["quality"]
    assert spec.reward.terms(procedural=False) == [] and spec.reward.reported == ["liked"]
    assert parse(JOB | judged()).pool_tasks("quality") == {PoolTask.REPLIES}


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"pools": [QUALITY]}, 'pools.0.name: "quality": nothing in the job uses this pool'),
        ({"pools": [QUALITY | {"name": "rollout"}]}, "is the pool of the replicas that generate"),
        (
            {"pools": [QUALITY, QUALITY], "reward": {"functions": [LIKED]}},
            'pools.1.name: "quality": an earlier pool has this name',
        ),
        (
            {"pools": [QUALITY], "reward": {"functions": [LIKED]}, "algorithm": {"distillation": {"pool": "quality"}}},
            "it is used for log-probabilities and for rewards, which no model gives",
        ),
        (
            {"pools": [QUALITY], "reward": {"functions": [LIKED, JUDGED]}},
            "it is used for replies and for rewards, which no model gives",
        ),
        ({"reward": {"functions": [JUDGED]}}, 'reward.functions.0.judge.pool: "quality": there is no such pool'),
        (judged(url="http://judge/v1"), 'reward.functions.0.judge.url: "http://judge/v1": a pool is given too'),
        (judged(model="j"), 'reward.functions.0.judge.model: "j": the pool has its model'),
        (judged(api_key="env:KEY"), "requests to a pool have the token of the deployment"),
        (judged(pool=None), "reward.functions.0.judge.url: null: neither url nor pool is given"),
        (judged(pool=None, url="http://judge/v1"), "reward.functions.0.judge.model: null: requests to a URL name"),
        ({"reward": {"functions": [LIKED]}}, 'reward.functions.0.pool: "quality": there is no such pool'),
        ({"algorithm": {"distillation": {"pool": "teacher"}}}, 'algorithm.distillation.pool: "teacher": there is no'),
        ({"reward": {"functions": [{"name": "x"}]}}, "neither a function nor a judge nor a pool is given"),
        (
            {"pools": [QUALITY], "reward": {"functions": [LIKED | {"function": "math"}]}},
            "a function is given too",
        ),
        (
            {"pools": [QUALITY], "reward": {"functions": [LIKED | {"scope": "group"}]}},
            'reward.functions.0.scope: "group": a pool scores each answer by itself',
        ),
    ],
)
def test_what_is_refused(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse(JOB | parts)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("config", "task", "told"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, PoolTask.REWARDS, "Qwen3ForCausalLM is no reward model"),
        ({}, PoolTask.REWARDS, "config.json names no architecture, which is no reward model"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
            PoolTask.REWARDS,
            "its head has 2 labels",
        ),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            PoolTask.LOGPROBS,
            "cannot give log-probabilities",
        ),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, PoolTask.REPLIES, "cannot give replies"),
        ({"architectures": ["BertForMaskedLM"]}, PoolTask.REPLIES, "BertForMaskedLM cannot give replies"),
        ({"architectures": ["Qwen3ForCausalLM"]}, PoolTask.REPLIES, "has no chat template"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 2048},
            PoolTask.LOGPROBS,
            "has positions up to 2048, and prompt and response together may have 4096 tokens",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 900}, PoolTask.LOGPROBS, "a vocabulary of 900 tokens"),
    ],
)
def test_folders_that_cannot_do_it(tmp_path: Path, config: dict[str, Any], task: PoolTask, told: str) -> None:
    policy, folder = tmp_path / "policy", tmp_path / "pool"
    for path, written in ((policy, {"vocab_size": 32_000}), (folder, config)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(written))
        (path / "tokenizer.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidJob) as refused:
        check_pool(str(policy), Pool(name="x", path=str(folder)), task, "pools.0.path", longest=4096)
    assert told in str(refused.value) and str(refused.value).startswith("pools.0.path: ")


def test_a_teacher_that_reports_too_much_is_refused() -> None:
    distillation = {"pool": "teacher", "loss": "forward_kl_topk", "top_k": 1024}
    rollout = {"samples_per_prompt": 16, "max_response_tokens": 8192}
    large = JOB | {"pools": [TEACHER], "rollout": rollout, "trainer": {"token_budget": 16384}}
    spec = parse(large | {"algorithm": {"distillation": distillation}})
    with pytest.raises(InvalidJob, match=r"algorithm\.distillation\.top_k: 1024: .* 1,024 MiB"):
        choices.check(spec)
    sampled_only = parse(large | {"algorithm": {"distillation": distillation | {"loss": "k1"}}})
    choices.check(sampled_only)
    assert (choices.teacher_top(spec), choices.teacher_top(sampled_only)) == (1024, 0)
    filtered = {"distillation": {"pool": "teacher"}, "drop_groups_without_signal": True}
    with pytest.raises(InvalidJob, match=r"drop_groups_without_signal: true: the rewards are not trained"):
        choices.check(parse(JOB | {"pools": [TEACHER], "algorithm": filtered}))
