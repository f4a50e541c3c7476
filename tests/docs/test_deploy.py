"""The containers are given the time that what runs in them may take to stop, and show themselves to this host alone."""

import re
from pathlib import Path

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


def test_rest_is_published_on_the_loopback_unless_told_otherwise() -> None:
    assert [port for service in SERVICES.values() for port in service.get("ports", [])] == [
        "${MILLRACE_HTTP_BIND:-127.0.0.1}:${MILLRACE_HTTP_PORT:-7700}:7700"
    ]


def test_the_file_that_git_tracks_holds_settings_of_compose_and_no_secret() -> None:
    lines = (DEPLOY.parent / ".env").read_text().splitlines()
    names = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    assert names == {"COMPOSE_FILE", "COMPOSE_PROJECT_NAME"}


def test_no_container_starts_without_a_token() -> None:
    for name in ("coordinator", "trainer", "rollout"):
        assert SERVICES[name]["environment"]["MILLRACE_TOKEN"].startswith("${MILLRACE_TOKEN:?")
        assert "MILLRACE_INSECURE" not in SERVICES[name]["environment"]
