import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from millrace.backends import BACKEND_NAMES, BACKENDS
from millrace.cli import doctor as probes
from millrace.cli.doctor import Finding, Need, Needed, Verdict
from millrace.engines import ENGINE_NAMES
from millrace.imports import failures
from millrace.software import Software, how_to_install, installed_release


def needed(package: str, module: str, *tested: str) -> Needed:
    releases = {package: tested} if tested else {}
    return Needed("thing", Need.GENERATE, Software("a thing", (package,), (module,), ("thing",), tested=releases))


def one(software: Needed) -> Finding:
    (found,) = probes.usable([software])
    return found


def test_what_is_not_installed_is_missing_and_says_how_to_install_it() -> None:
    found = one(needed("no-such-distribution", "nothing"))
    assert found.verdict is Verdict.MISSING and "uv pip install -e '.[thing]'" in found.fix


def test_an_install_for_the_cpu_leaves_out_what_breaks_there() -> None:
    told = how_to_install("cpu-vllm", "gpu-vllm")
    assert "-e '.[cpu-vllm]' --override deploy/cpu-overrides.txt or '.[gpu-vllm]' in the checkout" in told


def test_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = {extra for needed in (*probes.WITH_TORCH, *probes.WITHOUT_TORCH) for extra in needed.software.extras}
    assert named <= set(project["optional-dependencies"])


def test_extras_of_gpus_have_cupy_and_the_releases_that_were_run() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_gpus = {name: packages for name, packages in extras.items() if name.startswith("gpu-")}
    assert {"gpu-fsdp2", "gpu-transformers"} <= of_gpus.keys()
    for name, packages in of_gpus.items():
        assert any("cupy" in package or "gpu-fsdp2" in package for package in packages), name
        own = [package for package in packages if not package.startswith("millrace[")]
        assert all("<" in package or "==" in package for package in own), name
    assert not any("cupy" in package for name in ("trainer", "transformers", "cpu") for package in extras[name])


def test_on_a_gpu_cupy_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "visible_devices", list)
    assert probes.cupy().verdict is Verdict.GOOD
    monkeypatch.setattr(probes, "visible_devices", lambda: ["0"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = probes.cupy()
    assert found.verdict is Verdict.MISSING and "gpu-fsdp2" in found.fix


def test_what_is_installed_and_does_not_import_is_broken_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = one(needed("pytest", "broken_engine"))
    assert found.verdict is Verdict.BROKEN and "torchvision::nms does not exist" in found.found


def test_what_groups_have_in_common_is_imported_once_and_a_crash_is_told_of_its_group_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    (tmp_path / "common_part.py").write_text(f"print('noise', file=open({str(log)!r}, 'a')); print('noise')\n")
    (tmp_path / "crashing.py").write_text("import os\nos.abort()\n")
    (tmp_path / "leaving.py").write_text("import common_part\nraise SystemExit('no licence')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    groups = {"good": ["common_part"], "crashing": ["crashing"], "leaving": ["leaving"], "absent": ["common_part.x"]}
    found = dict(failures(groups, first="common_part"))
    assert found["good"] == "" and found["crashing"] == "importing it ended with status -6"
    assert found["leaving"] == "SystemExit: no licence" and "common_part.x" in found["absent"]
    assert log.read_text() == "noise\n", "it was imported more than once"


def test_what_all_import_and_what_ends_the_process_is_told_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = "importing crashing ended with status -6"
    assert dict(failures({"one": ["json"], "other": ["json"]}, first="crashing")) == {"one": ended, "other": ended}


def test_doctor_prints_a_finding_before_the_next_is_known(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def examine() -> Iterator[Finding]:
        yield Finding("vllm", Need.GENERATE, Verdict.GOOD, "vllm 1.0")
        assert "vllm 1.0" in capsys.readouterr().out
        yield Finding("fsdp2", Need.TRAIN, Verdict.BROKEN, "[torch] is gone", "install it")

    monkeypatch.setattr(probes, "examine", examine)
    with pytest.raises(typer.Exit) as ended:
        probes.doctor()
    printed = capsys.readouterr().out
    assert ended.value.exit_code == 0 and "[torch] is gone" in printed and "can generate with vllm" in printed


def test_what_imports_is_good_in_a_tested_release_and_a_warning_in_another() -> None:
    release = installed_release("pytest")
    assert one(needed("pytest", "pytest")).verdict is Verdict.GOOD
    assert one(needed("pytest", "pytest", release.partition(".")[0])).verdict is Verdict.GOOD
    found = one(needed("pytest", "pytest", "1.0"))
    assert found.verdict is Verdict.WARNING and "tested with 1.0" in found.fix


def test_the_local_build_tag_does_not_make_a_release_another() -> None:
    torch = BACKENDS["fsdp2"].software
    assert torch.was_tested("torch", "2.13.0+cpu") and not torch.was_tested("torch", "2.9.1+cpu")
    assert not torch.was_tested("torch", "2.130.0")


def test_only_engines_and_backends_that_work_count() -> None:
    findings = [
        Finding("vllm", Need.GENERATE, Verdict.BROKEN, ""),
        Finding("transformers", Need.GENERATE, Verdict.WARNING, ""),
        Finding("scoring", Need.GENERATE, Verdict.GOOD, ""),
    ]
    assert probes.can(findings, ENGINE_NAMES) == ["transformers"]
    assert probes.can(findings, BACKEND_NAMES) == []


def test_secrets_of_a_redis_url_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "rediss://somebody:secret@redis.example:6379/0")
    assert probes.redis_server().found == "REDIS_URL is set: rediss://redis.example:6379/0"


def test_a_redis_server_is_found_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    found = probes.redis_server()
    assert found.verdict is Verdict.GOOD and "Redis server" in found.found


def test_python_and_machine_are_told() -> None:
    assert sys.executable in probes.python().found
    assert "cores" in probes.machine().found
