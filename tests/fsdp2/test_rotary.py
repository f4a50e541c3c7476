"""Rotary positions that depend on how long a text is are refused, unless the job's texts are too short for it."""

from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.fsdp2.rules import check_submission
from tests.fsdp2.test_sequence_parallel import DENSE, job

LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def config(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**DENSE, "max_position_embeddings": 131072, "rope_parameters": settings, **more}


@pytest.mark.parametrize(
    ("stated", "engine_options", "field", "told"),
    [
        (config(LONG, original_max_position_embeddings=1024), {}, "rollout.max_response_tokens", "beyond 1024 tokens"),
        (config({**LONG, "original_max_position_embeddings": 512}), {}, "rollout.max_response_tokens", "beyond 512"),
        (
            {"text_config": config({"full_attention": LONG}, original_max_position_embeddings=1024)},
            {},
            "rollout.max_response_tokens",
            "(longrope) by different rules",
        ),
        (
            config(LONG, original_max_position_embeddings=8192),
            {"vllm": {"max_model_len": 9000}},
            "rollout.engine_options.vllm.max_model_len",
            "beyond 8192 tokens",
        ),
        (config({"rope_type": "dynamic", "factor": 2.0}), {}, "model.path", "(dynamic) by different rules"),
        ({**DENSE, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "model.path", "(dynamic)"),
        (config({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, model_type="llama"), {}, "model.path", "("),
    ],
)
def test_refused(tmp_path: Path, stated: dict[str, Any], engine_options: dict[str, Any], field: str, told: str) -> None:
    """The texts of the job have up to 2048 tokens."""
    with pytest.raises(InvalidJob) as refused:
        check_submission(job(tmp_path, stated, {}, engine_options=engine_options))
    (mistake,) = refused.value.mistakes
    assert mistake.field == field and told in mistake.reason and mistake.fix


@pytest.mark.parametrize(
    "stated",
    [
        config(YARN),
        config(LONG, original_max_position_embeddings=2048),
        config({"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, model_type="hunyuan_v1_dense"),
        config({"rope_type": "default"}),
        DENSE,
    ],
)
def test_accepted(tmp_path: Path, stated: dict[str, Any]) -> None:
    check_submission(job(tmp_path, stated, {}))


def test_the_critics_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"algorithm\.critic\.path: .*\(dynamic\)"):
        check_submission(job(tmp_path, DENSE, {}, config({"rope_type": "dynamic", "factor": 2.0})))
