"""Which files a sandbox sees: what it is asked for, without what is broad or hidden."""

import os
import sys
from pathlib import Path

import pytest

import millrace
from millrace.sandbox.view import view


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "mine.py").write_text("x = 1\n")
    return folder / "mine.py"


def test_python_millrace_and_the_folder_of_the_code_are_seen(reward: Path) -> None:
    shown = view([reward]).shown
    for path in (sys.base_prefix, str(Path(millrace.__file__).parent), str(reward.parent)):
        assert any(Path(os.path.realpath(path)).is_relative_to(each) for each in shown), path


def test_the_checkout_around_millrace_is_not_seen(reward: Path) -> None:
    home = Path(millrace.__file__).parents[1]
    assert not any(home.is_relative_to(each) for each in view([reward]).shown)
    assert not any(str(home / "docs") == each for each in view([reward]).shown)


def test_nothing_is_mounted_twice(reward: Path) -> None:
    shown = view([reward, reward.parent]).shown
    assert len(shown) == len(set(shown))
    assert not [inner for inner in shown for outer in shown if inner != outer and Path(inner).is_relative_to(outer)]


def test_of_a_broad_folder_only_the_file_is_seen(monkeypatch: pytest.MonkeyPatch, reward: Path) -> None:
    monkeypatch.setenv("HOME", str(reward.parent))
    code = view([reward]).code
    assert str(reward) in code and str(reward.parent) not in code


@pytest.mark.parametrize("path", ["/tmp", "/", "/home", "/var/lib"])
def test_broad_entries_of_the_search_path_are_not_seen(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, path])
    assert path not in view().code


def test_the_working_folder_is_seen_only_where_the_search_path_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    assert str(tmp_path) not in view().code
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert str(tmp_path) in view().code


def test_a_hidden_folder_hides_what_lies_in_it(reward: Path) -> None:
    seen = view([reward], hidden=[str(reward.parent)])
    assert str(reward.parent) not in seen.code and str(reward) in seen.code
    assert view([reward], hidden=[str(reward.parent.parent)]).code == seen.code


def test_a_link_to_the_code_leads_there_inside_too(reward: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(reward.parent)
    seen = view([tmp_path / "linked" / "mine.py"])
    assert str(reward.parent) in seen.code
    assert (str(tmp_path / "linked"), str(reward.parent)) in seen.links


def test_a_path_that_does_not_exist_is_left_out() -> None:
    assert not [path for path in view([Path("/no/such/folder/mine.py")]).shown if "such" in path]
