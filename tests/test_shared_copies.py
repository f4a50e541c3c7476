"""Model folders in shared memory: one copy for all users, removed with the last one, however that one ends."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from millrace import shared_copies
from millrace.errors import InvalidJob, Unavailable
from tests.services.trainer.groups import job_spec

USER = """
import sys
from pathlib import Path
from millrace import shared_copies
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


def sized(memory: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory of `size` bytes, of which the files there take theirs."""
    usage = namedtuple("usage", ["total", "used", "free"])

    def measured(_: Path) -> usage:
        used = sum(file.stat().st_size for file in memory.rglob("*") if file.is_file())
        return usage(size, used, size - used)

    monkeypatch.setattr(shutil, "disk_usage", measured)


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


def test_what_a_killed_process_leaves_is_removed_before_there_is_no_room(
    memory: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    killed = user(memory, model)
    left = path_of(killed)
    shared_copies.collect()
    assert left.is_dir()
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    sized(memory, 1500, monkeypatch)  # room for one of the two
    copy = shared_copies.acquire(other)
    assert copies(memory) == [copy.path]
    copy.release()
    assert not copies(memory)


def test_half_a_copy_of_a_killed_process_takes_no_room(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shared_copies.acquire(model)
    copy.release()
    partial = copy.path.with_name(f"{copy.path.name}.partial")
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(bytes(900))
    sized(memory, 1500, monkeypatch)
    again = shared_copies.acquire(model)
    assert copies(memory) == [again.path] == [copy.path]
    again.release()


def test_a_folder_that_changed_gets_a_copy_of_its_own(memory: Path, model: Path) -> None:
    first = shared_copies.acquire(model)
    (model / "model.safetensors").write_bytes(bytes(2000))
    second = shared_copies.acquire(model)
    assert first.path != second.path and len(copies(memory)) == 2
    first.release()
    second.release()
    assert not copies(memory)


def test_where_there_is_no_room_the_job_is_refused(memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(memory, 500, monkeypatch)
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


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ("model.path", {"model": {"use_shm": True, "path": "/missing"}}),
        ("model.weights", {"model": {"use_shm": True, "weights": "/missing"}}),
        ("algorithm.critic.path", {"model": {"use_shm": True}, "algorithm": {"critic": {"path": "/missing"}}}),
    ],
)
def test_a_folder_that_the_host_lacks_is_named_and_the_other_copies_are_released(
    field: str, parts: dict[str, Any], memory: Path, model: Path
) -> None:
    algorithm = {"advantage": "gae", "critic": {}, **parts.get("algorithm", {})}
    with pytest.raises(InvalidJob, match=f'{field}: "/missing": .* cannot read this folder: No such file'):
        shared_copies.in_shared_memory(job_spec(model, **{**parts, "algorithm": algorithm}))
    assert not copies(memory)


def test_shared_memory_that_cannot_be_written_is_refused(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_copies, "SHARED_MEMORY", memory / "missing")
    with pytest.raises(
        InvalidJob, match=r"model\.use_shm: true: .* cannot be made: No such file .* Fix: let this user"
    ):
        shared_copies.acquire(model)
    shared_copies.collect()


def home_of(memory: Path) -> Path:
    return memory / f"millrace-models-{os.getuid()}"


def open_to_others(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home_of(memory).mkdir(mode=0o755)


def a_link(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (memory / "elsewhere").mkdir(mode=0o700)
    home_of(memory).symlink_to(memory / "elsewhere")


def a_file(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home_of(memory).write_text("")


def of_another_user(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    home_of(memory).mkdir(mode=0o700)


@pytest.mark.parametrize("prepared", [open_to_others, a_link, a_file, of_another_user])
def test_what_another_user_may_have_filled_is_refused(
    prepared: Any, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(memory, monkeypatch)
    home = home_of(memory)
    if home.is_dir():
        (home / "model.lock").write_text("")
        (home / "model").mkdir()
    with pytest.raises(InvalidJob, match=rf"model\.use_shm: true: {home} is not a folder .* Fix: remove it, or set"):
        shared_copies.acquire(model)
    shared_copies.collect()
    assert not home.is_dir() or (home / "model").is_dir()
