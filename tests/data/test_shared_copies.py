"""Model folders in shared memory: one copy for all users, removed with the last one, however that one ends."""

import fcntl
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from millrace.data import shared_copies
from millrace.errors import InvalidJob, Unavailable
from tests.services.trainer.groups import job_spec

USER = """
import sys
from pathlib import Path
from millrace.data import shared_copies
shared_copies.SHARED_MEMORY = Path(sys.argv[1])
copy = shared_copies.acquire(Path(sys.argv[2]))
print(copy.path, flush=True)
sys.stdin.readline()
copy.release()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_copies, "SHARED_MEMORY", folder)
    monkeypatch.setattr(shared_copies, "KEPT_FREE", 0)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def user(memory: Path, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", USER, str(memory), str(model)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def path_of(running: subprocess.Popen[str]) -> Path:
    """The copy that the process uses; its log is on the same stream."""
    assert running.stdout
    return next(Path(line.strip()) for line in running.stdout if line.startswith("/"))


def copies(memory: Path) -> list[Path]:
    return [path for path in memory.glob("*/*") if path.is_dir()]


def test_several_processes_share_one_copy(memory: Path, model: Path) -> None:
    users = [user(memory, model) for _ in range(3)]
    (path,) = {path_of(each) for each in users}
    assert (path / "model.safetensors").read_bytes() == bytes(1000)
    assert copies(memory) == [path]
    for each in users[:2]:
        each.communicate("done\n", timeout=30)
        assert path.is_dir()
    users[2].communicate("done\n", timeout=30)
    assert not copies(memory)


def test_what_a_killed_process_leaves_is_removed_by_the_next(memory: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    killed = user(memory, model)
    left = path_of(killed)
    shared_copies.collect()
    assert left.is_dir()
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    copy = shared_copies.acquire(other)
    assert copies(memory) == [copy.path]
    copy.release()
    assert not copies(memory)


def test_a_folder_that_changed_gets_a_copy_of_its_own(memory: Path, model: Path) -> None:
    first = shared_copies.acquire(model)
    (model / "model.safetensors").write_bytes(bytes(2000))
    second = shared_copies.acquire(model)
    assert first.path != second.path and len(copies(memory)) == 2
    first.release()
    second.release()
    assert not copies(memory)


def test_where_there_is_no_room_the_job_is_refused(memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2000, 1500, 500))
    with pytest.raises(InvalidJob, match=r"model.use_shm: true: .* GB free, .* Fix: free or enlarge it"):
        shared_copies.acquire(model)
    assert not copies(memory)


def test_waiting_for_another_process_has_an_end(memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copies, "WAIT_S", 0.1)
    copy = shared_copies.acquire(model)
    fcntl.flock(copy._lock, fcntl.LOCK_EX)
    with pytest.raises(Unavailable, match="still being made by another process"):
        shared_copies.acquire(model)
    copy.release()


def test_a_spec_without_it_stays_as_it_is(memory: Path, model: Path) -> None:
    spec = job_spec(model, algorithm={"advantage": "gae", "critic": {"path": str(model)}})
    assert shared_copies.in_shared_memory(spec) == (spec, [])
    asked = spec.model_copy(update={"model": spec.model.model_copy(update={"use_shm": True})})
    read_from, used = shared_copies.in_shared_memory(asked)
    critic = read_from.algorithm.critic
    assert critic is not None and critic.path == read_from.model.path == str(used[0].path)
    for copy in used:
        copy.release()
    assert not copies(memory)


def test_a_checkpoint_with_the_weights_is_copied_too(memory: Path, model: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(bytes(10))
    spec = job_spec(model, model={"use_shm": True, "weights": str(checkpoint)})
    read_from, used = shared_copies.in_shared_memory(spec)
    assert [read_from.model.path, read_from.model.weights] == [str(copy.path) for copy in used]
    assert read_from.model.weights and (Path(read_from.model.weights) / ".metadata").is_file()
    for copy in used:
        copy.release()
    assert not copies(memory)
