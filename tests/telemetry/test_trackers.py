import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from millrace.errors import InvalidJob
from millrace.spec.schedule import Tracking
from millrace.telemetry import trackers


def a_run(folder: Path) -> trackers.TrackedJob:
    return trackers.TrackedJob("job-0123456789ab", "demo", "millrace", folder, {"name": "demo"})


def test_tensorboard_files_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tracker,) = trackers.open_trackers(["tensorboard"], a_run(tmp_path))
    for step, reward in ((1, 0.25), (2, 0.5)):
        tracker.log(step, {"critic/rewards/mean": reward, "timing_s/step": 1.5, "actor/grad_norm": math.inf})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(1, 0.25), (2, 0.5)]
    assert [e.value for e in events.Scalars("timing_s/step")] == [1.5, 1.5]
    assert [e.value for e in events.Scalars("actor/grad_norm")] == [math.inf, math.inf]


def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tracker,) = trackers.open_trackers(["wandb"], a_run(tmp_path))
    tracker.log(1, {"critic/rewards/mean": 0.25, "actor/grad_norm": math.inf, "actor/loss": math.nan})
    tracker.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_a_tracker_that_is_not_installed_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        trackers.TRACKERS, "absent", trackers.TrackerEntry("nowhere", "Nothing", "no_such_package_at_all")
    )
    with pytest.raises(InvalidJob, match="no_such_package_at_all") as refused:
        trackers.check_trackers(["absent"])
    assert "uv pip install no_such_package_at_all" in refused.value.fix


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
