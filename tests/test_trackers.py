import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from millrace import trackers
from millrace.errors import InvalidJob
from millrace.rest import SampleView
from millrace.spec.schedule import Tracking

ODD = "<b>|two\nlines| ↵ \u2028 \x07 😀 " + 3000 * "x"


def a_run(folder: Path, *, offline: bool = True) -> trackers.TrackedJob:
    spec = {"name": "demo", "rollout": {"engine_options": {"a b@c": [1, None]}}, "long": 9000 * "x"}
    return trackers.TrackedJob("job-0123456789ab", "demo", "millrace", folder, spec, offline)


def a_sample(step: int, **changes: Any) -> SampleView:
    sample: dict[str, Any] = {
        "step": step,
        "prompt_id": "0-1",
        "purpose": "train",
        "prompt": "2+2?",
        "answer": "4",
        "ground_truth": "4",
        "reward": 1.0,
        "reward_failure": None,
        "stop_reason": "end_of_turn",
        "tokens": 1,
        "versions": [0, 1],
        "member": "rollout-0",
    }
    return SampleView.model_validate({**sample, **changes})


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_every_tracker_takes_all_metrics_and_samples_and_goes_on_after_a_restart(name: str, tmp_path: Path) -> None:
    pytest.importorskip(trackers.TRACKERS[name].package)
    for step in (1, 2):
        (tracker,) = trackers.open_trackers([name], a_run(tmp_path))
        tracker.log(step, {"val-core/a b/reward/mean@4": 0.25, "actor/grad_norm": math.inf, "actor/loss": math.nan})
        odd = a_sample(step, prompt=ODD, answer=ODD, ground_truth={"of": [ODD]}, reward=None, reward_failure=ODD)
        tracker.log_samples(step, [a_sample(step), odd])
        tracker.close()
    assert any(file.is_file() for file in tmp_path.rglob("*"))


def test_lines_are_read_back_and_a_line_that_was_cut_is_removed(tmp_path: Path) -> None:
    def log(step: int) -> None:
        (tracker,) = trackers.open_trackers(["jsonl"], a_run(tmp_path))
        tracker.log(step, {"critic/rewards/mean": 0.25 * step, "actor/grad_norm": math.inf})
        tracker.log_samples(step, [a_sample(step, answer=ODD)])
        tracker.close()

    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    log(1)
    with metrics.open("ab") as file, samples.open("ab") as other:
        file.write(b'{"step": 2, "critic/rew')
        other.write(b"x" * 100_000)
    log(2)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(row["step"], row["critic/rewards/mean"], row["actor/grad_norm"]) for row in rows] == [
        (1, 0.25, "Infinity"),
        (2, 0.5, "Infinity"),
    ]
    found = [SampleView.model_validate_json(line) for line in samples.read_bytes().split(b"\n")[:-1]]
    assert found == [a_sample(1, answer=ODD), a_sample(2, answer=ODD)]


def test_a_file_of_one_line_that_was_cut_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"{")
    (tracker,) = trackers.open_trackers(["jsonl"], a_run(tmp_path))
    tracker.log(1, {"critic/rewards/mean": 0.25})
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_tensorboard_files_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tracker,) = trackers.open_trackers(["tensorboard"], a_run(tmp_path))
    for step, reward in ((1, 0.25), (2, 0.5)):
        tracker.log(step, {"critic/rewards/mean": reward, "timing_s/step": 1.5, "actor/grad_norm": math.inf})
    tracker.log_samples(2, [a_sample(2, answer="a|b\nc")])
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(1, 0.25), (2, 0.5)]
    assert [e.value for e in events.Scalars("timing_s/step")] == [1.5, 1.5]
    assert [e.value for e in events.Scalars("actor/grad_norm")] == [math.inf, math.inf]
    (table,) = events.Tensors("samples")
    head, line, row = table.tensor_proto.string_val[0].decode().splitlines()
    assert head.startswith("|step|purpose|") and set(line) == set("|-") and "|a\\|b↵ c|" in row


@pytest.mark.parametrize("by", ["job", "environment"])
def test_wandb_writes_an_offline_run(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # wandb reads the environment once in a process
    monkeypatch.setenv("WANDB_MODE", "offline" if by == "environment" else "online")
    (tracker,) = trackers.open_trackers(["wandb"], a_run(tmp_path, offline=by == "job"))
    tracker.log(1, {"critic/rewards/mean": 0.25, "actor/grad_norm": math.inf, "actor/loss": math.nan})
    tracker.log_samples(1, [a_sample(1)])
    tracker.close()
    assert list(tmp_path.rglob("*.wandb")) and list(tmp_path.rglob("samples_*.table.json"))


def test_mlflow_has_one_run_with_metrics_parameters_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):  # as after a restart of the coordinator
        (tracker,) = trackers.open_trackers(["mlflow"], a_run(tmp_path, offline=False))
        tracker.log(step, {"val-core/a/reward/mean@4": 0.25 * step, "actor/grad_norm": math.nan})
        tracker.log_samples(step, [a_sample(step)])
        tracker.close()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("millrace").experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "val-core/a/reward/mean_at_4")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.params["name"] == "demo" and "actor/grad_norm" in run.data.metrics
    assert json.loads(Path(tmp_path / "mlflow-artifacts" / run.info.run_id / "artifacts/spec.json").read_text())
    tables = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert [table["path"] for table in tables] == ["samples/step-000001.json", "samples/step-000002.json"]
    table = json.loads((tmp_path / "mlflow-artifacts" / run.info.run_id / "artifacts" / tables[1]["path"]).read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["answer"] == "4"


def test_a_tracker_that_is_not_installed_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        trackers.TRACKERS, "absent", trackers.TrackerEntry("nowhere", "Nothing", "no_such_package_at_all")
    )
    with pytest.raises(InvalidJob, match="no_such_package_at_all") as refused:
        trackers.check_trackers(["absent"])
    assert "uv pip install no_such_package_at_all" in refused.value.fix
    entry = trackers.TrackerEntry("nowhere", "Nothing", "no_such_package_at_all", "no-such-distribution")
    monkeypatch.setitem(trackers.TRACKERS, "absent", entry)
    with pytest.raises(InvalidJob) as refused:
        trackers.check_trackers(["absent"])
    assert "uv pip install no-such-distribution" in refused.value.fix


def test_an_unknown_tracker_is_refused_naming_the_known() -> None:
    with pytest.raises(InvalidJob, match="ledgerboard") as refused:
        trackers.check_trackers(["ledgerboard"])
    assert "tensorboard" in refused.value.fix


def test_the_spec_takes_exactly_the_registered_trackers() -> None:
    assert Tracking(trackers=list(trackers.TRACKERS)).trackers == list(trackers.TRACKERS)
    with pytest.raises(ValidationError):
        Tracking(trackers=["no-such-tracker"])


def test_telemetry_imports_no_torch() -> None:
    program = (
        "import sys, importlib, pkgutil, millrace.telemetry as t\n"
        "for m in pkgutil.walk_packages(t.__path__, 'millrace.telemetry.'):\n"
        "    try: importlib.import_module(m.name)\n"
        "    except ModuleNotFoundError as e: assert e.name.split('.')[0] in ('tensorboard', 'wandb'), e\n"
        "assert not {'torch', 'tensorflow', 'vllm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
