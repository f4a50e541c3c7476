"""The mistakes of a first day: each is told by `millrace validate` or at submission, in one screen, with the field and
the fix."""

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from millrace.admission import trials
from millrace.cli import app
from millrace.client import Client
from millrace.data.row import PromptRow, write_rows
from millrace.errors import InvalidJob
from tests.forked import Forked
from tests.models import save_tiny_model
from tests.services.coordinator.conftest import running

pytestmark = pytest.mark.slow

FUNCTION = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    "


@dataclass(frozen=True)
class Wrong:
    """A job with one mistake, and how it is told."""

    told_of: str
    """The field."""
    words: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the job, by their path. `{}` in a text is the folder of the test."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of that folder."""
    at_submission: bool = True
    """Whether the coordinator can see it without running the user's code or reading all data."""


ROW = {"data_source": "sums", "prompt": "1 + 1 =", "reward_model": {"ground_truth": "2"}}
WITHOUT_PROMPT = {"data_source": "sums", "reward_model": {"ground_truth": "2"}}
MISTAKES = {
    "typo": Wrong("rollout.temprature", "did you mean `temperature`?", {"rollout.temprature": 0.7}),
    "number as text": Wrong("schedule.prompts_per_step", "without quotes", {"schedule.prompts_per_step": "4"}),
    "missing file": Wrong("data.files", "there is no file", {"data.files": ["{}/none.jsonl"]}),
    "wrong column": Wrong(
        "data.files",
        "has no column prompt or messages",
        {"data.files": ["{}/columns.jsonl"]},
        {"columns.jsonl": json.dumps({"question": "1 + 1 =", **WITHOUT_PROMPT})},
    ),
    "row without prompt": Wrong(
        "data.files",
        "line 2, column prompt: is missing",
        {"data.files": ["{}/rows.jsonl"]},
        {"rows.jsonl": "\n".join(map(json.dumps, [ROW, WITHOUT_PROMPT, ROW]))},
        at_submission=False,
    ),
    "reward that does not import": Wrong(
        "reward.function",
        "No module named 'nothing_here'",
        {"reward.function": "{}/imports.py:f"},
        {"imports.py": f"import nothing_here\n{FUNCTION}return 1"},
        at_submission=False,
    ),
    "reward that raises": Wrong(
        "reward.function",
        "raised KeyError: 'nope' (raises.py, line 2)",
        {"reward.function": "{}/raises.py:f"},
        {"raises.py": f"{FUNCTION}return extra_info['nope']"},
        at_submission=False,
    ),
    "no chat template": Wrong("model.path", "has no chat template", {"model.path": "{}/plain"}),
    "budget too small": Wrong("trainer.token_budget", "raise it to at least 58", {"trainer.token_budget": 32}),
    "unknown algorithm": Wrong("algorithm.advantage.name", "did you mean `grpo`?", {"algorithm.advantage": "gropo"}),
    "engine option misspelt": Wrong(
        "rollout.engine_options.vllm.max_num_seqz",
        "did you mean `max_num_seqs`?",
        {"rollout.engine_options": {"vllm": {"max_num_seqz": 8}}},
    ),
    "model of another architecture": Wrong(
        "model.path", "BertForMaskedLM does not generate text", {"model.path": "{}/other"}
    ),
    "output in use": Wrong("output", "holds checkpoints of an earlier job", {"output": "{}/used"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job without a mistake, and what the jobs with one name."""
    made = tmp_path_factory.mktemp("job")
    model = save_tiny_model(made / "model", tied=True)
    for name in ("plain", "other"):
        (made / name).mkdir()
        for file in model.iterdir():
            (made / name / file.name).symlink_to(file)
    (made / "plain" / "chat_template.jinja").unlink()
    (made / "other" / "config.json").unlink()
    (made / "other" / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    (made / "used" / "checkpoints" / "step-2").mkdir(parents=True)
    asked: list[Any] = [[{"role": "user", "content": f"{n} + 1 ="}] for n in range(8)]
    write_rows(made / "train.jsonl", [PromptRow(n, "sums", asked[n], ground_truth=str(n + 1)) for n in range(8)])
    for wrong in MISTAKES.values():
        for name, text in wrong.files.items():
            (made / name).write_text(text)
    return made


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `validate` runs in processes of their own is forked here; tests/admission/test_thorough.py and
    tests/test_cli.py start it by its command."""

    def run(module: str, lines: Sequence[Mapping[str, Any]], limit_s: float) -> tuple[list[dict[str, Any]], str]:
        asked, printed = tmp_path / f"{module}.asked", tmp_path / f"{module}.printed"
        asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert Forked(module, (), os.environ, printed, asked).wait(limit_s) == 0, printed.read_text()
        return [json.loads(line) for line in printed.read_text().splitlines() if line.startswith("{")], ""

    monkeypatch.setattr(trials, "_run", run)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running(tmp_path_factory.mktemp("coordinator")) as coordinator:
        yield coordinator.client


def job(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": "sums",
        "output": str(folder / "output"),
        "model": {"path": str(folder / "model")},
        "data": {"files": [str(folder / "train.jsonl")], "max_prompt_tokens": 48},
        "reward": {"function": "exact"},
        "rollout": {"max_response_tokens": 10},
        "schedule": {"steps": 2, "prompts_per_step": 4},
    }
    for path, value in copy.deepcopy(changes).items():
        *above, name = path.split(".")
        part = tree
        for step in above:
            part = part.setdefault(step, {})
        part[name] = value
    return json.loads(json.dumps(tree).replace("{}", str(folder)))  # type: ignore[no-any-return]


def check(told: str, wrong: Wrong) -> None:
    """One screen, without a name of Python's or pydantic's."""
    assert len(told.splitlines()) <= 24 and len(told) < 2000
    (line,) = [line for line in told.splitlines() if wrong.words in line]
    assert line.strip().startswith(wrong.told_of) and "Fix: " in line
    assert "Traceback" not in told and "pydantic" not in told


@pytest.mark.parametrize("name", MISTAKES)
def test_validate_tells_it(name: str, folder: Path, tmp_path: Path) -> None:
    wrong = MISTAKES[name]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(folder, wrong.changes)))
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml")], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    check(result.stderr, wrong)


@pytest.mark.parametrize("name", [name for name, wrong in MISTAKES.items() if wrong.at_submission])
def test_the_coordinator_refuses_it(name: str, folder: Path, client: Client) -> None:
    wrong = MISTAKES[name]
    with pytest.raises(InvalidJob) as refused:
        client.submit(job(folder, wrong.changes))
    check(str(refused.value), wrong)
    assert client.jobs() == []


def test_thirteen_are_listed() -> None:
    assert len(MISTAKES) == 13


def test_a_job_without_a_mistake_is_told_what_was_looked_at(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(folder, {})))
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "data: 8 of 8 rows can be used" in result.stdout
    assert "prompts of data: 8 looked at" in result.stdout
    assert "reward of data: exact scored 8 of 8 rows; the first one's ground truth as an" in result.stdout
    assert "model, data and reward are usable." in result.stdout
