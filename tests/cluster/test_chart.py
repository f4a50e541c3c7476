"""The chart of deploy/helm, rendered by Helm for each of its sizes and held against Kubernetes' own schemas."""

import asyncio
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.errors import Unavailable
from services.coordinator.scaling import scalers
from tests.certificates import Authority
from tests.services.coordinator.scaling.test_scalers import Api, serving

validation = pytest.importorskip("kubernetes_validate")
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm"
HELM = os.environ.get("HELM") or shutil.which("helm") or ""
SIZES = sorted((CHART / "sizes").glob("*.yaml"))
PLAIN = "tls.plaintext=true"
RELEASES = ("1.31", "1.34")
"""The oldest release of Kubernetes that the chart allows, and a newer one."""
CUSTOM = {
    "LeaderWorkerSet": ("leaderWorkerTemplate", "workerTemplate"),
    "ServiceMonitor": None,
    "ScrapeConfig": None,
}
"""Kinds of others, which Kubernetes has no schema of, and where they hold a pod's template."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HELM, reason="there is no helm: put it on the PATH, or name one in HELM"),
]


@functools.cache
def rendered(*values: Path | str, release: str = RELEASES[-1], fails: bool = False) -> list[dict[str, Any]]:
    options = [word for one in values for word in (("--values", str(one)) if isinstance(one, Path) else ("--set", one))]
    command = [HELM, "template", "mill", str(CHART), "--namespace", "lab", "--kube-version", release, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0) is fails, done.stderr
    return [] if fails else [document for document in yaml.safe_load_all(done.stdout) if document]


def templates(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The template of each kind of pods, with the name of the object."""
    for each in objects:
        spec = each.get("spec", {})
        found = spec.get("template")
        for key in CUSTOM.get(each["kind"]) or ():
            found = (found or spec)[key]
        if found:
            yield each["metadata"]["name"], found


def environment(template: Mapping[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in template["spec"]["containers"][0].get("env", [])}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.stem)
def test_every_object_is_valid(size: Path, release: str) -> None:
    objects = rendered(size, release=release)
    for each in objects:
        if each["kind"] not in CUSTOM:
            validation.validate(each, release, strict=True)
    for name, template in templates(objects):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **template["metadata"]},
            "spec": template["spec"],
        }
        validation.validate(pod, release, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.stem)
def test_no_pod_is_root_and_each_gets_the_time_of_its_drain(size: Path) -> None:
    """Kubernetes kills after 30 seconds by default."""
    found = dict(templates(rendered(size)))
    for template in found.values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
        given = environment(template)
        drain_s = int(given.get("MILLRACE_DRAIN_S") or given.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 0)
        assert spec["terminationGracePeriodSeconds"] >= drain_s + 60
    assert {"mill-coordinator", "mill-trainer", "mill-rollout"} <= set(found)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.stem)
def test_what_selects_pods_finds_them(size: Path) -> None:
    """Services, budgets, network policies and controllers name labels that pods have."""
    objects = rendered(size)
    labels = [template["metadata"]["labels"] for _, template in templates(objects)]
    for each in objects:
        spec = each.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector") or {}
        wanted = selector.get("matchLabels", selector if each["kind"] == "Service" else {})
        if wanted and each["kind"] not in CUSTOM:
            assert any(wanted.items() <= one.items() for one in labels), (each["kind"], each["metadata"]["name"])


def read_by_services() -> str:
    """Text that has each variable of the services in quotes."""
    files = [path for folder in ("millrace", "services") for path in (ROOT / folder).rglob("*.py")]
    of_tls = (ROOT / "docs/security.md").read_text().replace("`", '"')
    return "\n".join([*(path.read_text() for path in files), of_tls])


def test_every_variable_is_an_option_of_a_service() -> None:
    """The chart has no options of its own for what a service reads."""
    read = read_by_services()
    named = {name for size in SIZES for _, one in templates(rendered(size)) for name in environment(one)}
    assert {name for name in named if name.startswith("MILLRACE_") and f'"{name}"' not in read} == set()
    assert len(named) > 10


def test_the_ranks_of_several_hosts_meet_at_the_first_pod() -> None:
    objects = rendered(CHART / "sizes/eight-hosts.yaml")
    (job,) = [each for each in objects if each["kind"] == "Job"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (4, 4, "Indexed")
    given = environment(job["spec"]["template"])
    assert given["HOSTS"] == "4" and given["MILLRACE_RANKS"] == "8"
    pod, _, domain = given["FIRST_HOST"].partition(".")
    assert pod == f"{job['metadata']['name']}-0" and domain == job["spec"]["template"]["spec"]["subdomain"]
    (headless,) = [each for each in objects if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == domain and headless["spec"]["publishNotReadyAddresses"]
    limits = [template["spec"]["containers"][0]["resources"].get("limits", {}) for _, template in templates(objects)]
    assert sorted(int(one["nvidia.com/gpu"]) for one in limits if "nvidia.com/gpu" in one) == [2, 2, 8]


def test_a_trainer_that_is_evicted_is_no_success(tmp_path: Path) -> None:
    """The command of the chart with another torchrun, which drains. An index of a Job that ends with 0 is over."""
    (job,) = [each for each in rendered(PLAIN) if each["kind"] == "Job"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    drained = tmp_path / "drained"
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        f"#!/bin/bash\ntrap 'sleep 0.3; touch {drained}; exit 0' TERM\necho $*\n[ -n \"$AT_ONCE\" ] && exit 0\n"
        "while true; do sleep 0.05; done\n"
    )
    torchrun.chmod(0o755)
    given = {name: str(value) for name, value in environment(job["spec"]["template"]).items() if value}
    variables = {**os.environ, **given, "JOB_COMPLETION_INDEX": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        told = running.stdout.readline()
        running.terminate()
        assert running.wait(20) == 143 and drained.exists()
    assert re.search(r"--nnodes 1 --node-rank 0 --nproc-per-node 4 --master-addr mill-trainer-0.mill-trainer ", told)
    ignored = [
        rule["onExitCodes"]["values"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert ignored == [[143]]
    done = subprocess.run(command, env={**variables, "AT_ONCE": "1"}, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0  # drained by `millrace drain`


def test_sandboxes_are_open_where_they_are_wanted_and_closed_elsewhere() -> None:
    replica = dict(templates(rendered(PLAIN)))["mill-rollout"]["spec"]
    assert replica["hostUsers"] is False and replica["securityContext"]["seccompProfile"]["type"] == "Unconfined"
    assert replica["containers"][0]["securityContext"]["procMount"] == "Unmasked"
    closed = dict(templates(rendered(CHART / "sizes/laptop.yaml")))["mill-rollout"]["spec"]
    assert closed["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault" and "hostUsers" not in closed


class GuardedApi(Api):
    """A scale that only those calls reach that a Role allows."""

    def __init__(self, role: Mapping[str, Any]) -> None:
        super().__init__()
        self._role = role

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        found = re.fullmatch(r"/apis/([^/]+)/v1/namespaces/([^/]+)/([^/]+)/([^/]+)/scale", path)
        assert found is not None and method in ("GET", "PATCH")
        group, namespace, resource, name = found.groups()
        asked = (group, f"{resource}/scale", name, method.lower())
        kinds = ("apiGroups", "resources", "resourceNames", "verbs")
        allowed = any(all(a in rule[k] for a, k in zip(asked, kinds, strict=True)) for rule in self._role["rules"])
        if namespace != "lab" or not allowed:
            return 403, {"kind": "Status", "message": f"{method} {path} is forbidden"}
        known = "/apis/apps/v1/namespaces/rl/deployments/millrace-rollout/scale"
        return super().answer(method, known, token, body)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_scaler_may_scale_its_group_and_nothing_else(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler of the chart's variables calls an API that obeys the chart's Role."""
    group = ("coordinator.autoscale.group=rollout", f"replicas[0].nodes={nodes}")
    objects = rendered(CHART / "sizes/one-host.yaml", *group)
    for each in objects:
        if each["kind"] not in CUSTOM:
            validation.validate(each, RELEASES[0], strict=True)
    (role,), (binding,), (account,) = (
        [each for each in objects if each["kind"] == kind] for kind in ("Role", "RoleBinding", "ServiceAccount")
    )
    found = dict(templates(objects))
    with_token = {name for name, one in found.items() if one["spec"]["automountServiceAccountToken"]}
    assert with_token == {"mill-coordinator"}
    assert found["mill-coordinator"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    subject = {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "lab"}
    assert binding["subjects"] == [subject]
    (scaled,) = [
        each for each in objects if each["metadata"]["name"] == "mill-rollout" and "Budget" not in each["kind"]
    ]
    assert "replicas" not in scaled["spec"], "an upgrade would set it"

    files, token = Authority(tmp_path / "pki").member("api"), tmp_path / "account"
    token.mkdir()
    for name, text in (("namespace", "lab"), ("ca.crt", files.ca.read_text()), ("token", "first")):
        (token / name).write_text(text)
    variables = environment(found["mill-coordinator"])
    assert variables["MILLRACE_AUTOSCALE"] == "1:4"
    resource, _, name = variables["MILLRACE_SCALER"].removeprefix("kubernetes:").partition("/")
    api = GuardedApi(role)
    with serving(api, files) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        asyncio.run(scalers.KubernetesScaler(resource, name, token).set(3))
        assert asyncio.run(scalers.KubernetesScaler(resource, name, token).current()) == 3
        with pytest.raises(Unavailable, match="403"):
            asyncio.run(scalers.KubernetesScaler(resource, "mill-judge", token).set(9))
    assert api.replicas == 3


def test_no_pod_has_a_token_of_kubernetes_and_no_other_group_scales() -> None:
    kinds = {each["kind"] for each in rendered(PLAIN)}
    assert not kinds & {"Role", "RoleBinding", "ServiceAccount"}
    for values in (
        ("coordinator.autoscale.group=judge",),
        ("coordinator.autoscale.group=rollout", "replicas[0].pool=judge"),
    ):
        rendered(CHART / "sizes/one-host.yaml", *values, fails=True)


def test_a_misspelt_value_a_missing_redis_and_missing_certificates_are_refused() -> None:
    rendered(PLAIN, fails=False)
    rendered(fails=True)
    rendered(PLAIN, "trainer.gpu=8", fails=True)
    rendered(PLAIN, "redis.enabled=false", fails=True)
    rendered(PLAIN, "redis.enabled=false", "redis.existingSecret=redis")
