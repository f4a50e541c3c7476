"""What is said where DeepEP cannot be used, by the trainer and by `millrace doctor`. How it computes: tests/gpu."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.backends.megatron import deepep_obstacle
from millrace.cli import doctor as probes
from millrace.cli.doctor import Verdict

WORKS = {"__init__.py": "class Buffer: ...\n", "utils.py": "class EventHandle: ...\nclass EventOverlap: ...\n"}
OTHER = {"__init__.py": "", "utils.py": ""}
BUILT_FOR_ANOTHER = {"__init__.py": "raise ImportError('undefined symbol: _ZN3c10')\n"}
NEEDS_ANOTHER = {"__init__.py": "import no_such_module\n"}


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.delitem(sys.modules, "deep_ep.utils", raising=False)
    deepep_obstacle.cache_clear()
    yield
    deepep_obstacle.cache_clear()


def install(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deep_ep").mkdir()
    for name, text in files.items():
        (folder / "deep_ep" / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "files", "why"),
    [
        (None, WORKS, "there is no GPU"),
        ((8, 0), WORKS, "need a Hopper GPU"),
        ((9, 0), None, "not installed"),
        ((9, 0), OTHER, "cannot be loaded: cannot import name 'Buffer'"),
        ((9, 0), BUILT_FOR_ANOTHER, "cannot be loaded: undefined symbol"),
        ((9, 0), NEEDS_ANOTHER, "cannot be loaded: No module named 'no_such_module'"),
        ((10, 0), WORKS, None),
    ],
    ids=["no-gpu", "ampere", "not-installed", "other-package", "other-torch", "needs-another", "works"],
)
def test_what_keeps_deepep_from_being_used(
    capability: tuple[int, int] | None,
    files: dict[str, str] | None,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, capability)
    if files is not None:
        install(files, tmp_path, monkeypatch)
    found = deepep_obstacle()
    assert found is None if why is None else found is not None and why in found


def test_doctor_says_that_it_is_missing_or_why_it_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("for hosts without a GPU")
    found = probes.deepep()
    assert found.verdict is Verdict.MISSING and "docs/megatron.md" in found.fix
    install(WORKS, tmp_path, monkeypatch)
    (tmp_path / "deep_ep-1.2.1.dist-info").mkdir()
    (tmp_path / "deep_ep-1.2.1.dist-info" / "METADATA").write_text("Name: deep_ep\nVersion: 1.2.1\n")
    found = probes.deepep()
    assert (found.verdict, found.found) == (Verdict.BROKEN, "deep_ep 1.2.1; there is no GPU")


@pytest.mark.parametrize(
    ("release", "verdict"), [("1.2.1+814e508", Verdict.GOOD), ("1.1.0", Verdict.WARNING)], ids=["tested", "other"]
)
def test_doctor_knows_the_release_that_was_tested(
    release: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "installed_release", lambda name: release)
    monkeypatch.setattr(probes, "_run", lambda command, timeout_s: "usable")
    assert probes.deepep().verdict is verdict
