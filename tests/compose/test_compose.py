"""The containers as a user runs them: `docker compose up`, a job over REST from the host, more replicas, a killed one.

Needs a Docker engine. With Compose v2 the job requires that rewards run in their sandboxes; Compose 1.29 does not read
`deploy/sandbox.yml`. The project's name, port and volumes are this test's own, and are removed at its end.
"""

import contextlib
import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.client import Client
from millrace.errors import MillraceError
from millrace.local.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
IS_V2 = not subprocess.run([*COMPOSE, "version", "--short"], capture_output=True, text=True).stdout.startswith("1.")
FILES = ["deploy/docker-compose.yml", *(["deploy/sandbox.yml"] if IS_V2 else [])]
STEPS = 40
TOKEN = "the-token-of-this-test"

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


class Project:
    """One compose project, run from the repository's root."""

    def __init__(self, port: int) -> None:
        self.url, self.port = f"http://127.0.0.1:{port}", port
        self.name = f"millrace-test-{port}"
        self.environment = os.environ | {
            "COMPOSE_FILE": ":".join(FILES),
            "COMPOSE_PROFILES": "cpu",
            "COMPOSE_PROJECT_NAME": self.name,
            "MILLRACE_HTTP_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "MILLRACE_TOKEN": TOKEN,
            "GRAFANA_PASSWORD": "the-password-of-this-test",
            "ENVIRONMENT_TOKEN": "the-token-of-the-environments",
            "ENVIRONMENT_PACKAGES": "openenv==0.4.1",
        }

    def compose(self, *words: str, timeout_s: float = 300.0) -> str:
        return self._run([*COMPOSE, *words], timeout_s)

    def docker(self, *words: str, timeout_s: float = 60.0) -> str:
        return self._run(["docker", *words], timeout_s)

    def _run(self, argv: list[str], timeout_s: float) -> str:
        done = subprocess.run(
            argv, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture
def project() -> Iterator[Project]:
    project = Project(free_port())
    try:
        yield project
    finally:
        # `--profile` would name the only profile, and leave the containers of the others.
        project.environment["COMPOSE_PROFILES"] = "cpu,environments"
        project.compose("down", "-v", "--remove-orphans", "-t", "20")
        left = project.docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={project.name}")
    assert not left, "`down` removes every container"


def until(what: str, holds: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if value := holds():
                return value
        except MillraceError:
            pass  # not up yet
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.5)


def serving(client: Client) -> list[Any]:
    return [replica for replica in client.fleet().replicas if replica.state == "serving"]


def test_up_learn_scale_kill(project: Project) -> None:
    project.compose("up", "-d", "--build", timeout_s=1500)
    client = Client(project.url, TOKEN)
    until("the coordinator answers", client.ready, 120)
    until("trainer and replica joined", lambda: client.fleet().trainers and client.fleet().replicas, 180)

    project.compose("run", "--rm", "--no-deps", "-T", "trainer", "python3", "-m", "millrace.demo.prepare", "/data/demo")
    text = project.compose("run", "--rm", "--no-deps", "-T", "trainer", "cat", "/data/demo/job.json")
    spec = json.loads(text)
    spec["schedule"] |= {"steps": STEPS, "max_staleness": 1}
    spec["reward"]["isolation"] = "required" if IS_V2 else "auto"
    job = client.submit(spec)
    until("three steps", lambda: client.job(job.id).step >= 3, 300)

    client.pause(job.id)  # engines take longer to start than these steps; who joins meanwhile gets the weights
    project.compose("up", "-d", "--no-recreate", "--scale", "rollout=3", timeout_s=300)
    until("three replicas serve", lambda: len(serving(client)) == 3, 400)
    client.resume(job.id)
    until("it goes on", lambda: client.job(job.id).step >= 6, 60)
    containers = project.compose("ps", "-q", "rollout").split()
    assert len(containers) == 3
    project.docker("kill", containers[0])

    done = client.wait(job.id, 600)
    assert done.state == "succeeded", done.failure
    assert done.evaluation_last is not None and done.evaluation_before is not None
    assert done.evaluation_last > done.evaluation_before + 0.2, "it learned"
    ledger = client.ledger(job.id)
    assert ledger.trained == STEPS * 16 and ledger.dropped == 0
    assert ledger.issued == ledger.queued + ledger.leased + ledger.generated + ledger.trained
    healthy = project.docker("ps", "--filter", "health=healthy", "--format", "{{.Names}}")
    for service in ("redis", "coordinator", "trainer"):
        assert service in healthy, f"{service} is not healthy: {healthy}"


def test_the_coordinator_adds_replicas_and_gives_them_back(project: Project) -> None:
    """It runs on the host, as it asks Docker for containers; trainer and replicas reach it at Docker's bridge."""
    show = ("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}")
    bridge, grpc_port = str(ipaddress.ip_network(project.docker(*show).strip())[1]), free_port()
    with tempfile.TemporaryDirectory(prefix="millrace-", dir="/tmp") as name, contextlib.ExitStack() as held:
        folder = Path(name)
        folder.chmod(0o777)  # the containers' user writes checkpoints there
        project.environment |= {
            "MILLRACE_DATA": name,
            "MILLRACE_COORDINATOR": f"{bridge}:{grpc_port}",
            "MILLRACE_HOST": bridge,
            "MILLRACE_PLAINTEXT": "1",
            "MILLRACE_AUTOSCALE": "1:3",
            "MILLRACE_SCALER": "compose:rollout",
            "MILLRACE_SCALE_UP_S": "5",
            "MILLRACE_SCALE_DOWN_S": "20",
        }
        project.compose("build", "trainer", "rollout", timeout_s=1500)
        own = ["--http-port", str(project.port), "--grpc-host", bridge, "--grpc-port", str(grpc_port)]
        command = [sys.executable, "-m", "services.coordinator", *own, "--state-dir", str(folder / "state")]
        log = held.enter_context((folder / "log").open("w"))
        coordinator = subprocess.Popen(command, cwd=ROOT, env=project.environment, stdout=log, stderr=log)
        # The coordinator ends first: it would start a replica in place of those that go. The folder is removed last.
        held.callback(project.compose, "down", "-v", "-t", "20")
        held.callback(coordinator.wait, 60)
        held.callback(coordinator.terminate)
        client = Client(project.url, TOKEN)
        until("the coordinator answers", client.ready, 120)
        project.compose("up", "-d", "--no-deps", "trainer", "rollout")
        until("trainer and replica joined", lambda: client.fleet().trainers and client.fleet().replicas, 180)
        demo = ("run", "--rm", "--no-deps", "-T", "trainer", "python3", "-m", "millrace.demo.prepare", f"{name}/demo")
        project.compose(*demo)
        spec = json.loads((folder / "demo" / "job.json").read_text())
        spec["schedule"] |= {"steps": 100_000, "max_staleness": 2}
        spec["rollout"]["engine_options"] = {"vllm": {"max_num_seqs": 2}, "transformers": {"max_num_seqs": 2}}
        job = client.submit(spec)
        # On few cores a third one may not make steps faster, and then none is asked for.
        until("more replicas serve", lambda: len(serving(client)) > 1, 600)
        client.cancel(job.id)
        until("the job ended", lambda: client.job(job.id).state == "cancelled", 60)
        count = ("ps", "--quiet", "--filter", f"label=com.docker.compose.project={project.name}")
        one = (*count, "--filter", "label=com.docker.compose.service=rollout")
        until("one replica is left", lambda: len(project.docker(*one).split()) == 1, 600)
        until("it alone serves", lambda: len(serving(client)) == 1, 60)
        ledger = client.ledger(job.id)
        assert set(ledger.reasons) <= {"job_cancelled"}, "no prompt was lost"
        assert ledger.issued == ledger.trained + ledger.dropped
        scaled = [event.data for event in client.events(job.id, follow=False) if event.kind == "replicas.scaled"]
        assert all(1 <= each.wanted <= 3 for each in scaled) and max(each.wanted for each in scaled) > 1


def test_the_coordinators_image_has_no_torch_and_runs_as_nobody_special(project: Project) -> None:
    project.compose("build", "coordinator", timeout_s=900)
    look = "import importlib.util as u, os; print(u.find_spec('torch'), u.find_spec('vllm'), os.getuid())"
    image = ["run", "--rm", "--no-deps", "-T", "coordinator", "python3", "-c", look]
    assert project.compose(*image).split() == ["None", "None", "10001"]


def test_the_environment_host_has_its_own_packages_and_wants_its_token(project: Project) -> None:
    project.compose("build", "environments", timeout_s=900)
    alone = ("run", "--rm", "--no-deps", "-T", "--entrypoint", "python3", "environments", "-c")
    look = (
        "import importlib.util as u, os; names = 'torch', 'millrace.spec', 'services.rollout'\n"
        "print([name for name in names if u.find_spec(name)], os.getuid())"
    )
    assert project.compose(*alone, look).split() == ["[]", "10001"]
    config = (ROOT / "examples/environments/verifiers/env.json").read_text()
    project.compose(*alone, f"open('/data/env.json', 'w').write({config!r})")
    told = project.compose("run", "--rm", "--no-deps", "-T", "environments", "tasks", "/data/env.json")
    assert [json.loads(line)["data_source"] for line in told.splitlines()] == ["openenv", "openenv"]
    project.compose("--profile", "environments", "up", "-d", "--no-deps", "environments")
    container = project.compose("ps", "-q", "environments").strip()
    state = ("inspect", "--format", "{{.State.Health.Status}}", container)
    until("the host answers", lambda: project.docker(*state).strip() == "healthy", 120)
    ask = "import urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:7790/episodes', b'{}'))"
    argv = ["docker", "exec", container, "python3", "-c", ask]
    asked = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "HTTP Error 401" in asked.stderr
