"""The containers are given the time that what runs in them may take to stop, and show themselves to this host alone."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]


def grace_s(service: str) -> int:
    return int(SERVICES[service]["stop_grace_period"].removesuffix("s"))


def test_a_container_is_killed_later_than_its_service_gives_up() -> None:
    source = (DEPLOY.parent / "services/rollout/__main__.py").read_text()
    (drain_s,) = re.findall(r"^    drain_s: Annotated\[.*?^    \] = ([\d.]+),$", source, re.MULTILINE | re.DOTALL)
    assert grace_s("rollout") > float(drain_s)
    (shutdown_s,) = re.findall(r"SHUTDOWN_TIMEOUT=(\d+)", (DEPLOY / "trainer.Dockerfile").read_text())
    assert grace_s("trainer") > int(shutdown_s)


def test_what_is_published_is_published_on_the_loopback_unless_told_otherwise() -> None:
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "coordinator": ["${MILLRACE_HTTP_BIND:-127.0.0.1}:${MILLRACE_HTTP_PORT:-7700}:7700"],
        "prometheus": ["${MILLRACE_WATCH_BIND:-127.0.0.1}:9090:9090"],
        "grafana": ["${MILLRACE_WATCH_BIND:-127.0.0.1}:3000:3000"],
    }


def test_the_profile_gpu_reserves_devices_and_is_otherwise_that_of_the_cpu() -> None:
    for name in ("trainer", "rollout"):
        cpu, gpu = SERVICES[name], SERVICES[f"{name}-gpu"]
        assert (cpu["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
        (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        assert gpu["stop_grace_period"] == cpu["stop_grace_period"] and gpu["volumes"] == cpu["volumes"]
        assert set(gpu["environment"]) - set(cpu["environment"]) == {"CUDA_VISIBLE_DEVICES"}
        known = set(re.findall(r"^ARG (\w+)", (DEPLOY / f"{name}.Dockerfile").read_text(), re.MULTILINE))
        assert set(gpu["build"]["args"]) <= known, "an argument that no line of the Dockerfile takes is ignored"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose")
@pytest.mark.parametrize("profile", ["cpu", "gpu", "watch", "environments"])
def test_docker_compose_takes_every_profile(profile: str) -> None:
    secrets = {"MILLRACE_TOKEN": "a", "GRAFANA_PASSWORD": "b", "COMPOSE_PROFILES": profile}
    command = ["docker-compose", "--file", "deploy/docker-compose.yml", "config", "--quiet"]
    variables = {"PATH": os.environ["PATH"], **secrets}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_watches_starts_only_when_asked_for_and_finds_its_files() -> None:
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["watch"]
        mounted = [volume.split(":")[0] for volume in SERVICES[name]["volumes"] if volume.startswith("./")]
        assert mounted and all((DEPLOY / folder).is_dir() for folder in mounted)


ROOT = DEPLOY.parent


def test_the_environment_host_starts_when_asked_for_and_holds_nothing_of_the_services() -> None:
    host = SERVICES["environments"]
    assert host["profiles"] == ["environments"] and "ports" not in host
    assert list(host["environment"]) == ["ENVIRONMENT_TOKEN"], "the code of others does not get the services' token"
    assert SERVICES["rollout"]["environment"]["ENVIRONMENT_TOKEN"] == host["environment"]["ENVIRONMENT_TOKEN"]
    recipe = (DEPLOY / "environments.Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", recipe, re.MULTILINE) for word in line.split()]
    shared = ["millrace/__init__.py", "millrace/wire/__init__.py", "millrace/wire/reach.py"]
    assert copied == ["deploy/wheels", *shared, "services/__init__.py", "services/environments"]
    (command,) = re.findall(r"^CMD (\[.*\])$", recipe, re.MULTILINE)
    told = [word for word in host["command"] if not word.startswith("${")]
    assert told == [word for word in json.loads(command) if word != "/data/env.json"]
    (port,) = re.findall(r"^EXPOSE (\d+)$", recipe, re.MULTILINE)
    assert command.endswith(f'"--port", "{port}"]') and f"'127.0.0.1', {port}, timeout=4" in recipe


def test_images_and_make_install_the_same_release_of_verifiers() -> None:
    (release,) = re.findall(r"^ARG VERIFIERS=(\S+)$", (DEPLOY / "environments.Dockerfile").read_text(), re.MULTILINE)
    assert f"verifiers=={release} " in (ROOT / "Makefile").read_text()


def settings(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_example_of_settings_names_the_compose_file_and_holds_no_secret() -> None:
    example = settings(ROOT / ".env.example")
    assert all((ROOT / file).is_file() for file in example["COMPOSE_FILE"].split(":"))
    assert example["MILLRACE_TOKEN"] == example["GRAFANA_PASSWORD"] == ""
    used = set(re.findall(r"\$\{(\w+)", (DEPLOY / "docker-compose.yml").read_text()))
    assert set(example) - used == {"COMPOSE_FILE", "COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"}


def test_git_and_images_leave_out_the_settings_with_the_token() -> None:
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()
    assert {".env", ".environments"} <= set((ROOT / ".dockerignore").read_text().splitlines())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_line_of_the_page_makes_settings_with_a_token(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\(umask 077; .*?\)(?=  )", (ROOT / "docs/running.md").read_text(), re.MULTILINE)
    assert line in (ROOT / ".env.example").read_text()
    shutil.copy(ROOT / ".env.example", tmp_path)
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    made = settings(tmp_path / ".env")
    assert re.fullmatch("[0-9a-f]{64}", made["MILLRACE_TOKEN"])
    assert re.fullmatch("[0-9a-f]{64}", made["GRAFANA_PASSWORD"]) and len(set(made.values())) == len(made)
    assert made | {"MILLRACE_TOKEN": "", "GRAFANA_PASSWORD": ""} == settings(ROOT / ".env.example")
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_the_replica_may_make_sandboxes_and_grafana_has_a_password_of_its_own() -> None:
    opened = yaml.safe_load((DEPLOY / "sandbox.yml").read_text())["services"]
    options = [f"{each}=unconfined" for each in ("seccomp", "apparmor", "systempaths")]
    assert opened == {name: {"security_opt": options} for name in ("rollout", "rollout-gpu")}
    assert all(f"--security-opt {each}" in (ROOT / "docs/running.md").read_text() for each in options)
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_no_container_starts_without_a_token() -> None:
    for name in ("coordinator", "trainer", "rollout"):
        assert SERVICES[name]["environment"]["MILLRACE_TOKEN"].startswith("${MILLRACE_TOKEN:?")
        assert "MILLRACE_INSECURE" not in SERVICES[name]["environment"]
