"""Checkpoints that are written while training goes on, by real ranks on a slow disk, a full one, and killed."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidState, NotFound
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import trainer
from tests.services.trainer.step.test_step import OPTIMIZER

pytestmark = pytest.mark.slow

TRAINER = {"optimizer": OPTIMIZER}


class Disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"module": "tests.services.trainer.checkpoints.slow_disk", "DISK": str(folder)}

    def hold(self) -> None:
        (self.folder / "held").touch()

    def release(self) -> None:
        (self.folder / "held").unlink()

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "saved").iterdir() if not path.name.startswith("."))

    def left(self) -> list[Path]:
        """Folders that interrupted saves have left."""
        return list((self.folder / "saved").glob(".*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "saved").mkdir()
    yield Disk(tmp_path)


def test_written_beside_steps_and_whole_or_not_there(
    disk: Disk, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    batches = {number: random_groups(4, 4, seed=number) for number in (1, 2, 3)}

    def step(number: int) -> dict[str, float]:
        served.script.groups = batches[number]
        return dict(calls.step(number, batches[number], served.address).metrics)

    with trainer(served, tmp_path / "log", ranks=2, **disk.environment) as running:
        calls = running.calls()
        calls.configure(job_spec(tied_model, trainer=TRAINER))
        step(1)
        disk.hold()
        assert calls.begin_save(str(saved / "one")).version == 1
        second = step(2)  # while both ranks write
        following = running.in_background(lambda: calls.save(str(saved / "two")))
        time.sleep(0.5)
        assert not following.done() and disk.saved() == [] and len(disk.left()) == 1
        disk.release()
        assert calls.finish_save(str(saved / "one")).version == 1
        assert following.result(30).version == 2 and disk.saved() == ["one", "two"] and disk.left() == []
        with pytest.raises(NotFound, match="began no checkpoint at"):
            calls.finish_save(str(saved / "one"))
        third = step(3)

        # What lies there is what was held when it was asked for.
        disk.hold()
        calls.begin_save(str(saved / "three"))
        loading = running.in_background(lambda: calls.load(str(saved / "one")))
        time.sleep(0.3)
        assert not loading.done()
        disk.release()
        assert loading.result(30).version == 1 and "three" in disk.saved()
        again = step(2)
        assert again["actor/grad_norm"] == second["actor/grad_norm"]

        # No space on one rank's disk.
        (disk.folder / "full-1").touch()
        calls.begin_save(str(saved / "full"))
        with pytest.raises(InvalidState, match=r"version 2 was not saved to .*full: rank 1 on .*No space left"):
            calls.finish_save(str(saved / "full"))
        (disk.folder / "full-1").unlink()
        assert disk.saved() == ["one", "three", "two"] and disk.left() == []

        # All ranks die in the middle.
        disk.hold()
        calls.begin_save(str(saved / "lost"))
        for rank in running.ranks():
            rank.send_signal(signal.SIGKILL)
        running.process.wait(60)
    disk.release()
    assert disk.saved() == ["one", "three", "two"]
    (half,) = disk.left()
    with trainer(served, tmp_path / "log-2", **disk.environment) as running:
        calls = running.calls()
        for name in ("lost", half.name):
            with pytest.raises(InvalidState, match="is not a checkpoint"):
                calls.configure(job_spec(tied_model, trainer=TRAINER), checkpoint=str(saved / name))
        calls.configure(job_spec(tied_model, trainer=TRAINER), checkpoint=str(saved / "two"))
        alone = step(3)
        assert alone["actor/grad_norm"] == pytest.approx(third["actor/grad_norm"], rel=2e-6)

        # One that ends waits for what it writes; what was left by the crash is gone by then.
        disk.hold()
        calls.begin_save(str(saved / "last"))
        assert not half.exists()
        running.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert running.process.poll() is None and "last" not in disk.saved()
        disk.release()
        assert running.process.wait(30) == 0 and "last" in disk.saved()


def test_a_job_may_wait_for_the_disk(disk: Disk, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path) -> None:
    spec: Any = job_spec(tied_model, schedule={"save_in_background": False})
    with trainer(served, tmp_path / "log", **disk.environment) as running:
        calls = running.calls()
        calls.configure(spec)
        disk.hold()
        saving = running.in_background(lambda: calls.begin_save(str(tmp_path / "saved" / "zero")))
        time.sleep(0.5)
        assert not saving.done()
        disk.release()
        assert saving.result(30).seconds > 0.4
        assert calls.finish_save(str(tmp_path / "saved" / "zero")).bytes > 0
        (disk.folder / "full-0").touch()
        with pytest.raises(InvalidState, match=r"rank 0 could not write its part of .*No space left"):
            calls.begin_save(str(tmp_path / "saved" / "one"))
        assert disk.saved() == ["zero"] and disk.left() == []
