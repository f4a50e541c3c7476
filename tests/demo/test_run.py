import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from millrace.cli import app
from millrace.demo.model import FAMILIES
from millrace.demo.run import JOB, MARGIN, Outcome, Run, print_outcome
from millrace.demo.run import app as demonstration
from millrace.drops import DropReason
from millrace.errors import InvalidJob
from millrace.rest import Coverage, JobState, JobView, LedgerView, StepMetrics
from millrace.spec import load


def outcome(after: float = 0.95, state: JobState = JobState.SUCCEEDED, trained: int = 960) -> Outcome:
    job = JobView(
        id="job-0123456789ab",
        name="demo",
        state=state,
        step=60,
        steps=60,
        version=60,
        reward=0.9,
        evaluation_before=0.1,
        evaluation_last=after,
        created_s=0.0,
        checkpoint="/out/checkpoint-60",
        report="/out/report.json",
        spec={},
    )
    ledger = LedgerView(
        issued=961, queued=0, leased=0, generated=0, trained=trained, dropped=1, reasons={DropReason.NO_SIGNAL: 1}
    )
    rows = [StepMetrics(step=n, time_s=0.0, values={"publication/pause_s": 0.01 * n}) for n in (1, 3)]
    return Outcome(job, ledger, rows, MARGIN)


def test_learned_means_succeeded_added_up_and_risen_by_the_margin() -> None:
    assert outcome().learned
    assert outcome(after=0.1 + MARGIN + 1e-9).learned
    assert not outcome(after=0.1 + MARGIN - 1e-6).learned
    assert not outcome(state=JobState.FAILED).learned
    assert not outcome(trained=959).learned
    unknown = replace(outcome(), job=outcome().job.model_copy(update={"evaluation_last": None}))
    assert not unknown.learned


def test_the_summary_says_all_that_a_newcomer_wants_to_know() -> None:
    console = Console(record=True, width=200, highlight=False)
    print_outcome(outcome(), {"model and data": 20.0, "job": 60.0}, console)
    text = console.export_text()
    for told in ("0.100 before, 0.950 after", "961 issued", "1 dropped (no_signal 1)", "20.0 ms a publication"):
        assert told in text
    assert "/out/checkpoint-60" in text and "/out/report.json" in text and "rose by 0.850, 0.30 is asked for" in text


def test_the_summary_says_of_how_many_held_out_prompts_a_score_is() -> None:
    coverage = {"evaluation_before_coverage": Coverage(scored=256, asked=256)}
    coverage |= {"evaluation_last_coverage": Coverage(scored=107, asked=256)}
    console = Console(record=True, width=200, highlight=False)
    print_outcome(replace(outcome(), job=outcome().job.model_copy(update=coverage)), {}, console)
    assert "0.100 before, 0.950 (107 of 256) after" in console.export_text()


def test_the_job_is_a_valid_spec_and_takes_the_run_s_folders(tmp_path: Path) -> None:
    assert load(JOB).schedule.steps == 60
    spec = Run(tmp_path, 4, 5).job_spec((tmp_path / "t.parquet", tmp_path / "h.parquet"))
    assert spec.model.path == str(tmp_path / "model-4")
    assert spec.data.files == [str(tmp_path / "t.parquet")] and spec.data.seed == spec.trainer.seed == 4
    assert spec.evaluation is not None and spec.evaluation.files == [str(tmp_path / "h.parquet")]
    assert spec.schedule.steps == spec.trainer.optimizer.warmup_steps == 5


def test_the_grown_model_has_a_job_of_its_own_for_the_rest_the_same(tmp_path: Path) -> None:
    data = (tmp_path / "t.parquet", tmp_path / "h.parquet")
    small, grown = (Run(tmp_path, 4, 5, "megatron", size).job_spec(data) for size in ("small", "grown"))
    assert grown.model.path != small.model.path and grown.rollout.dtype == "bfloat16"
    assert grown.rollout.options_of("vllm")["max_model_len"] == small.rollout.options_of("vllm")["max_model_len"]
    assert grown.algorithm == small.algorithm and grown.evaluation == small.evaluation


def test_another_family_has_folders_of_its_own_and_the_same_job(tmp_path: Path) -> None:
    data = (tmp_path / "t.parquet", tmp_path / "h.parquet")
    usual, hybrid = (Run(tmp_path, 4, 5, family=family).job_spec(data) for family in FAMILIES[:2])
    assert Path(hybrid.model.path).name == "model-qwen3.5-4" and usual.model.path != hybrid.model.path
    assert hybrid.rollout == usual.rollout and hybrid.trainer == usual.trainer


@pytest.mark.parametrize(("options", "told"), [(("--model", "qwen4"), "qwen4"), (("--size", "grown"), "grown")])
def test_a_family_or_a_size_of_it_that_does_not_exist_is_refused(options: tuple[str, ...], told: str) -> None:
    asked = ["--model", "qwen3.5", *options]
    result = CliRunner().invoke(demonstration, asked)
    assert isinstance(result.exception, InvalidJob) and "--model: there is no" in str(result.exception)
    assert told in str(result.exception)


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--task", "look", "--model", "qwen3"), "needs qwen2.5-vl"), (("--model", "qwen2.5-vl"), "look")],
)
def test_a_model_that_does_not_fit_the_task_is_refused(options: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(demonstration, options)
    assert isinstance(result.exception, InvalidJob) and told in str(result.exception)


@pytest.mark.parametrize("module", ["millrace.demo", "demo"])
def test_a_demo_that_cannot_run_says_why_and_the_fix(module: str, tmp_path: Path) -> None:
    argv = (sys.executable, "-m", module, "--state", str(tmp_path), "--engine", "vllmm")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(
        '--engine: "vllmm": there is no such engine.\nFix: did you mean `vllm`? Choose one of '
    )


@pytest.mark.slow
def test_the_command_runs_the_demo_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    argv = (str(Path(sys.executable).with_name("millrace")), "demo", "--state", "file/demo")
    environment = {**os.environ, "PYTHONPATH": str(JOB.parents[2])}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    told = done.stderr.splitlines()
    assert told[0] == f"--state: {tmp_path}/file/demo: Not a directory." and told[1].startswith("Fix: name a folder")


def test_the_command_says_what_the_demo_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cli.DEMO_NEEDS", ("pyarrow", "no_such_package"))
    result = CliRunner().invoke(app, ["demo", "--seed", "1"])
    assert result.exit_code == 1
    assert "packages that are not installed here: no_such_package." in result.stderr and "`make demo`" in result.stderr


def test_an_install_has_every_file_of_the_demo() -> None:
    setuptools = tomllib.loads((JOB.parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["millrace*", "services*"], "no package has a common name"
    data = [path for path in JOB.parent.iterdir() if path.is_file() and path.suffix != ".py"]
    assert JOB in data
    assert all(any(path.match(pattern) for pattern in setuptools["package-data"]["millrace.demo"]) for path in data)


@pytest.mark.parametrize("text", ["+0.30", "make demo", "make test"])
def test_the_readme_states_the_margin_and_the_two_commands(text: str) -> None:
    assert f"{MARGIN:.2f}" == "0.30"
    assert text in Path("README.md").read_text()
