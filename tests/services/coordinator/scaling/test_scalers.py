"""What starts and stops replicas, and the limits that an operator gives."""

import asyncio
import contextlib
import json
import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.errors import InvalidState, Unavailable
from services.coordinator.scaling import scalers
from services.coordinator.scaling.autoscaler import limits
from services.coordinator.scaling.scalers import KubernetesScaler, LocalScaler, scaler
from tests.certificates import Authority, Files
from tests.deploy.expressions import OF_AUTOSCALING, lacking
from tests.services.coordinator.cluster import until
from tests.services.coordinator.conftest import running
from tests.telemetry.metrics.pages import value


def test_the_local_scaler_reads_what_runs(tmp_path: Path) -> None:
    state = {
        "complete": True,
        "replicas": 3,
        "processes": {"coordinator": 1, "trainer": 2, "rollout-0": 3, "rollout-1": 4},
    }
    (tmp_path / "stack.json").write_text(json.dumps(state))
    assert asyncio.run(LocalScaler(tmp_path).current()) == 2, "one of them was drained or died"
    (tmp_path / "stack.json").write_text(json.dumps(state | {"complete": False}))
    assert asyncio.run(LocalScaler(tmp_path).current()) == 3, "the supervisor still starts them"
    (tmp_path / "stack.json").unlink()
    with pytest.raises(Unavailable, match=r"stack\.json cannot be read"):
        asyncio.run(LocalScaler(tmp_path).current())


@pytest.mark.parametrize("text", ["3", "3:1", "0:0", "a:b", "1:2:3", "-1:3", "1:2000"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidState, match=r"--autoscale: .* is not MIN:MAX.*Fix"):
        limits(text, 0.0, 0.0)


def test_a_budget_needs_a_price() -> None:
    with pytest.raises(InvalidState, match="--replica-price"):
        limits("1:3", 0.0, 5.0)
    assert limits("1:8", 2.0, 5.0).most == 2


def test_an_unknown_scaler_is_refused() -> None:
    for kind in ("nomad", "slurm:", "compose:", "kubernetes:", "kubernetes:pods/x", "kubernetes:../secrets", "none:x"):
        with pytest.raises(InvalidState, match="local, none"):
            scaler(kind, "")
    with pytest.raises(InvalidState, match="belongs to no local stack"):
        scaler("local", "")


def test_a_coordinator_that_scales_shows_what_it_wants(empty_redis_url: str, tmp_path: Path) -> None:
    """With the scaler `none` somebody else reads the metrics and starts the replicas."""
    environment = {"REDIS_URL": empty_redis_url, "MILLRACE_AUTOSCALE": "2:3", "MILLRACE_SCALER": "none"}

    async def played(port: int) -> str:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:

            async def page() -> str:
                return (await http.get("/metrics")).text

            return str(await until(page, lambda found: lacking(found, OF_AUTOSCALING) == [], within_s=120))

    with running(tmp_path / "state", environment=environment) as coordinator:
        found = asyncio.run(played(coordinator.http_port))
    assert value(found, 'millrace_replicas_wanted{pool="rollout"}') == 2
    assert value(found, 'millrace_replicas_ready{pool="rollout"}') == 0
    assert value(found, 'millrace_scalings_total{pool="rollout",reason="limits"}') == 1


class Api:
    """The scale subresource of a Kubernetes API, with the state of one Deployment."""

    def __init__(self) -> None:
        self.replicas, self.token, self.calls = 2, "first", list[tuple[str, str]]()

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.calls.append((method, path))
        if token != f"Bearer {self.token}":
            return 403, {"kind": "Status", "message": "deployments.apps is forbidden"}
        if path != "/apis/apps/v1/namespaces/rl/deployments/millrace-rollout/scale":
            return 404, {"kind": "Status", "message": "not found"}
        if method == "PATCH":
            self.replicas = json.loads(body)["spec"]["replicas"]
        spec = {"replicas": self.replicas} if self.replicas else {}
        return 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec, "status": {"replicas": 1}}


@contextlib.contextmanager
def serving(api: Api, files: Files) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.command == "PATCH" and self.headers["content-type"] != "application/merge-patch+json":
                status, document = 415, {"message": "unsupported media type"}
            else:
                status, document = api.answer(self.command, self.path, self.headers.get("authorization", ""), body)
            written = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(written)))
            self.end_headers()
            self.wfile.write(written)

        do_GET = do_PATCH = handle_any

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_kubernetes_scales_by_the_scale_subresource(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, api = Authority(tmp_path / "pki").member("api"), Api()
    account = tmp_path / "account"
    account.mkdir()
    (account / "namespace").write_text("rl\n")
    (account / "ca.crt").write_bytes(files.ca.read_bytes())
    monkeypatch.setattr(scalers, "SERVICE_ACCOUNT", account)
    with pytest.raises(InvalidState, match="are not set"):
        KubernetesScaler("deployments", "millrace-rollout", account)
    with serving(api, files) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        scaled = KubernetesScaler("deployments", "millrace-rollout", account)

        async def play() -> None:
            (account / "token").write_text("first")
            assert await scaled.current() == 2
            for wanted in (5, 5, 0):
                await scaled.set(wanted)
                assert await scaled.current() == api.replicas == wanted
            api.token = "second"
            with pytest.raises(Unavailable, match=r"403: deployments\.apps is forbidden.*service account"):
                await scaled.set(1)
            (account / "token").write_text("second\n")
            await scaled.set(1)
            with pytest.raises(InvalidState, match=r"leaderworkersets/other/scale with 404"):
                await KubernetesScaler("leaderworkersets", "other", account).current()

        asyncio.run(play())
    assert api.replicas == 1
    with pytest.raises(Unavailable, match="did not answer GET"):
        asyncio.run(scaled.current())
    assert api.calls[-1][1] == "/apis/leaderworkerset.x-k8s.io/v1/namespaces/rl/leaderworkersets/other/scale"


PROGRAM = """#!{python}
# A `docker` and a `docker-compose` that know two commands of compose, and keep the number of containers in a file.
import pathlib, sys
state, arguments = pathlib.Path({state!r}), sys.argv[1:]
count = int(state.read_text())
if arguments[0] == "inspect":
    assert len(arguments) == 3 + count, arguments
    print("restarting", *["running"] * (count - 1), "exited", sep="\\n")
    sys.exit()
if pathlib.Path(sys.argv[0]).name == "docker":
    if arguments.pop(0) != "compose" or not {plugin}:
        sys.exit("docker: unknown command: docker compose")
    if arguments == ["version"]:
        sys.exit()
assert arguments[:2] == ["--file", "my stack.yml"], arguments
if arguments[2] == "ps":
    print("".join(f"{{number:064x}}\\n" for number in range(count + 1)), end="")
elif arguments[2] == "up" and arguments[-1] == "rollout":
    wanted = int(arguments[arguments.index("--scale") + 1].removeprefix("rollout="))
    if wanted > 3:
        sys.exit("no space left on device")
    state.write_text(str(wanted))
else:
    sys.exit(2)
"""


@pytest.mark.parametrize("plugin", [True, False])
def test_compose_scales_a_service_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: bool) -> None:
    (tmp_path / "count").write_text("1")
    for name in ("docker", *([] if plugin else ["docker-compose"])):
        program = PROGRAM.format(python=sys.executable, state=str(tmp_path / "count"), plugin=plugin)
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    scaled = scaler("compose:--file 'my stack.yml' rollout", "")

    async def play() -> None:
        assert await scaled.current() == 1
        for wanted in (3, 3, 1):
            await scaled.set(wanted)
            assert await scaled.current() == wanted
        with pytest.raises(Unavailable, match="status 1: no space left on device"):
            await scaled.set(4)

    asyncio.run(play())
    (tmp_path / "docker").unlink()
    with pytest.raises(InvalidState, match="docker cannot be run"):
        asyncio.run(scaler("compose:rollout", "").current())
    if not plugin:
        (tmp_path / "docker").write_text(
            PROGRAM.format(python=sys.executable, state=str(tmp_path / "count"), plugin=False)
        )
        (tmp_path / "docker").chmod(0o755)
        (tmp_path / "docker-compose").unlink()
        with pytest.raises(Unavailable, match="unknown command: docker compose"):
            asyncio.run(scaler("compose:rollout", "").current())


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"did not end within 0\.2 s"):
        asyncio.run(scalers._ran(["sleep", "600"], 0.2))
