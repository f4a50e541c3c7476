"""What only this machine can tell of a job: here of its critic's folder. Needs no torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.data.row import PromptRow
from millrace.data.write import write_rows
from millrace.errors import InvalidJob
from millrace.spec import submission


def model_folder(folder: Path, tokens: int = 259, tokenizer: bool = True) -> Path:
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": tokens}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def job(folder: Path, critic: dict[str, Any]) -> dict[str, Any]:
    rows = write_rows(folder / "train.parquet", [PromptRow(0, "sums", "1 + 1 =", ground_truth="2")])
    return {
        "name": "a job",
        "output": str(folder / "out"),
        "model": {"path": str(model_folder(folder / "policy"))},
        "data": {"files": [str(rows)]},
        "reward": {"function": "exact"},
        "algorithm": {"preset": "ppo", "critic": critic},
    }


def test_a_critic_may_have_a_folder_of_its_own_without_a_tokenizer(tmp_path: Path) -> None:
    assert submission.check(job(tmp_path, {})).algorithm.critic is not None
    folder = model_folder(tmp_path / "critic", tokenizer=False)
    (tmp_path / "second").mkdir()
    spec = submission.check(job(tmp_path / "second", {"path": str(folder)}))
    assert spec.algorithm.critic is not None and spec.algorithm.critic.path == str(folder)


@pytest.mark.parametrize(
    ("made", "words"),
    [(None, "there is no folder"), (300, "it knows 300 tokens and the policy 259")],
)
def test_one_that_cannot_judge_the_policy_is_refused(made: int | None, words: str, tmp_path: Path) -> None:
    if made is not None:
        model_folder(tmp_path / "critic", tokens=made)
    with pytest.raises(InvalidJob, match=rf"algorithm\.critic\.path: .* will not do: {words}"):
        submission.check(job(tmp_path, {"path": str(tmp_path / "critic")}))


def test_an_advantage_without_its_critic_is_told_with_all_else(tmp_path: Path) -> None:
    tree = job(tmp_path, {}) | {"algorithm": {"advantage": {"name": "gae"}, "aggregation": "mean"}, "output": "here"}
    with pytest.raises(InvalidJob) as refusal:
        submission.check(tree)
    for words in ("it needs a critic", 'algorithm.aggregation: "mean"', 'output: "here"'):
        assert words in str(refusal.value)
