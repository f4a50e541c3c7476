"""The REST API: what people send and what they are told."""

import asyncio
import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from millrace.errors import InvalidState
from millrace.events import Event, EventKind, StepDone
from millrace.rest import JobState
from millrace.telemetry.metrics.declaration import Owner
from services.coordinator.rest import bodies
from services.coordinator.rest.jobs import frame
from tests.deploy.expressions import OF_PROMETHEUS, lacking, without_data
from tests.deploy.scrape import scraped
from tests.services.coordinator.cluster import Cluster, scenario
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.telemetry.metrics.pages import value

pytestmark = pytest.mark.slow


@pytest.fixture
def http(shared: CoordinatorProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{shared.http_port}", trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A coordinator that knows its name."""
    environment = {"MILLRACE_HOST": "mill.example.org"}
    with (
        running(tmp_path_factory.mktemp("named"), environment=environment) as coordinator,
        httpx.Client(base_url=f"http://127.0.0.1:{coordinator.http_port}", trust_env=False) as client,
    ):
        yield client


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status and document["detail"]
    return document


def test_a_job_is_submitted_once_per_key(http: httpx.Client, spec: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": f"key of {spec['output']}"}
    first = http.post("/v1/jobs", json=spec, headers=headers)
    assert first.status_code == 201 and first.json()["state"] == "queued"
    job_id = first.json()["id"]
    assert first.headers["location"] == f"/v1/jobs/{job_id}"
    again = http.post("/v1/jobs", json=spec, headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, job_id)
    other = problem(http.post("/v1/jobs", json=spec | {"name": "other"}, headers=headers), 409)
    assert job_id in other["detail"] and "new key" in other["fix"]
    elsewhere = spec | {"output": f"{spec['output']}-other"}
    assert http.post("/v1/jobs", json=elsewhere).json()["id"] != job_id
    listed = [job["id"] for job in http.get("/v1/jobs").json()["jobs"]]
    assert listed.count(job_id) == 1
    assert http.get(f"/v1/jobs/{job_id}").json()["spec"]["schedule"]["prompts_per_step"] == 4
    for job in http.get("/v1/jobs").json()["jobs"]:
        http.delete(f"/v1/jobs/{job['id']}")


def test_jobs_are_listed_in_pages_without_their_specs(http: httpx.Client, spec: dict[str, Any]) -> None:
    ids = [http.post("/v1/jobs", json=spec | {"output": f"{spec['output']}-{n}"}).json()["id"] for n in range(3)]
    http.delete(f"/v1/jobs/{ids[1]}")
    first = http.get("/v1/jobs", params={"limit": 2}).json()
    assert [job["id"] for job in first["jobs"]] == ids[:0:-1] and "spec" not in first["jobs"][0]
    second = http.get("/v1/jobs", params={"limit": 1, "cursor": first["next"]}).json()
    assert [job["id"] for job in second["jobs"]] == ids[:1] and second["total"] == first["total"] >= 3
    cancelled = http.get("/v1/jobs", params={"state": "cancelled", "limit": 1}).json()
    assert [job["id"] for job in cancelled["jobs"]] == [ids[1]]
    for query, name in (
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("state=asleep", "state"),
        ("cursor=x", "cursor"),
    ):
        assert name in problem(http.get(f"/v1/jobs?{query}"), 422)["detail"]
    for job_id in (ids[0], ids[2]):
        http.delete(f"/v1/jobs/{job_id}")


def test_a_spec_may_be_yaml(http: httpx.Client, spec: dict[str, Any]) -> None:
    answer = http.post("/v1/jobs", content=yaml.safe_dump(spec), headers={"Content-Type": "application/yaml"})
    assert answer.status_code == 201
    assert http.delete(f"/v1/jobs/{answer.json()['id']}").json()["state"] == "cancelled"


def test_every_mistake_is_told_at_once(http: httpx.Client, spec: dict[str, Any], tmp_path: Path) -> None:
    spec["model"]["path"] = str(tmp_path / "nowhere")
    spec["data"]["files"] = [str(tmp_path / "missing.jsonl")]
    spec["reward"]["function"] = "exakt"
    spec["algorithm"] = {
        "advantage": {"name": "grbo"},
        "policy_loss": {"name": "ppo", "options": {"clip_hi": 0.2}},
        "kl": {"name": "k9"},
        "aggregation": "token-average",
    }
    told = problem(http.post("/v1/jobs", json=spec), 422)
    detail = told["detail"]
    for part in ("nowhere", "missing.jsonl", "exakt", "grbo", "clip_hi", "k9", "token-average"):
        assert part in detail, part
    assert detail.count("Fix:") >= 7
    assert len(told["mistakes"]) == detail.count("Fix:")


def test_bad_bodies_are_refused(http: httpx.Client, spec: dict[str, Any]) -> None:
    torn = http.post("/v1/jobs", content=b"{", headers={"Content-Type": "application/json"})
    assert "cannot be read" in problem(torn, 422)["detail"]
    deep = b"[" * 10_000 + b"]" * 10_000
    for kind in ("application/json", "application/yaml"):
        nested = http.post("/v1/jobs", content=deep, headers={"Content-Type": kind})
        assert "cannot be read" in problem(nested, 422)["detail"]
    assert "a list" in problem(http.post("/v1/jobs", json=[]), 422)["detail"]
    unknown = problem(http.post("/v1/jobs", json=spec | {"modell": 1}), 422)
    assert "did you mean `model`?" in unknown["detail"]
    relative = problem(http.post("/v1/jobs", json=spec | {"output": "out"}), 422)
    assert "output" in relative["detail"] and "absolute path" in relative["detail"]


@pytest.mark.parametrize("kind", ["", "text/plain", "text/plain; application/json", "multipart/form-data"])
def test_a_body_is_json_or_yaml(http: httpx.Client, spec: dict[str, Any], kind: str) -> None:
    """What a browser sends for any page without asking the coordinator first is neither."""
    answer = http.post("/v1/jobs", content=json.dumps(spec), headers={"Content-Type": kind} if kind else {})
    assert "application/json" in problem(answer, 415)["fix"]


def test_a_body_that_is_too_large_for_a_job_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/jobs", content=b" " * (bodies.MAX_BYTES + 1), headers={"Content-Type": "application/json"})
    assert str(bodies.MAX_BYTES) in problem(answer, 413)["detail"]


CIRCULAR = "rollout: {engine_options: &a {x: *a}}"
UNFIT = "rollout: {engine_options: {x: !!int ''}}"
MANY = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "\n".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]" for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (json.dumps({"output": "/tmp/\0x"}), 'output: "/tmp/\\u0000x": '),
        (json.dumps({"output": "/tmp/\ud800x"}), 'output: "/tmp/\\ud800x": '),
        (json.dumps({"rollout": {"engine_options": {"\ud800": 1}}}), "rollout.engine_options.\\ud800: "),
        ("rollout: {engine_options: {x: !!binary gICAgA==}}", "rollout.engine_options.x: "),
        (CIRCULAR, "rollout.engine_options.x: contains itself"),
        (MANY, "at most 100000 values"),
        (UNFIT, "cannot be read"),
    ],
)
def test_what_cannot_be_kept_is_refused(http: httpx.Client, written: str, told: str) -> None:
    kind = "application/json" if written.startswith("{") else "application/yaml"
    answer = http.post("/v1/jobs", content=written, headers={"Content-Type": kind})
    document = problem(answer, 422)
    assert told in document["detail"] and ("Fix: " in document["detail"] or document["fix"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1.evil.example:7700"},
    ],
)
def test_without_a_token_pages_of_others_are_kept_out(http: httpx.Client, headers: dict[str, str]) -> None:
    assert "MILLRACE_TOKEN" in problem(http.post("/v1/jobs/job-000000000000/resume", headers=headers), 403)["fix"]
    problem(http.get("/v1/jobs", headers=headers), 403)
    problem(http.post("/v1/fleet/rollout-nowhere/drain", headers=headers), 403)


@pytest.mark.parametrize("host", ["localhost:1", "coordinator:1", "10.0.0.1", "[::1]:1", "Mill.Example.org:1"])
def test_its_own_page_may_ask(named: httpx.Client, host: str) -> None:
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert named.get("/v1/jobs", headers=headers).status_code == 200


def test_a_model_without_chat_template_is_refused(http: httpx.Client, spec: dict[str, Any]) -> None:
    (Path(spec["model"]["path"]) / "chat_template.jinja").unlink()
    assert "no chat template" in problem(http.post("/v1/jobs", json=spec), 422)["detail"]


@pytest.mark.parametrize("content", ["", "{not json}\n", '{"data_source": "sums"}\n'])
def test_an_empty_or_malformed_data_file_is_refused(content: str, http: httpx.Client, spec: dict[str, Any]) -> None:
    Path(spec["data"]["files"][0]).write_text(content)
    assert "train.jsonl" in problem(http.post("/v1/jobs", json=spec), 422)["detail"]


def test_what_is_not_there_is_not_found(http: httpx.Client, spec: dict[str, Any]) -> None:
    job_id = http.post("/v1/jobs", json=spec).json()["id"]
    for path in ("", "/events", "/metrics", "/samples", "/ledger"):
        assert "job-nowhere" in problem(http.get(f"/v1/jobs/job-nowhere{path}"), 404)["detail"]
    for verb in ("pause", "resume"):
        problem(http.post(f"/v1/jobs/job-nowhere/{verb}"), 404)
    problem(http.delete("/v1/jobs/job-nowhere"), 404)
    for odd in (f"{job_id}:events", f"{job_id}:train:state", f"{job_id}%0A", f"{job_id}%00"):
        problem(http.get(f"/v1/jobs/{odd}"), 404)
    http.delete(f"/v1/jobs/{job_id}")
    problem(http.post("/v1/fleet/rollout-nowhere/drain"), 404)
    problem(http.get("/v2/jobs"), 404)


def test_a_state_that_does_not_allow_it_is_a_conflict(http: httpx.Client, spec: dict[str, Any]) -> None:
    job_id = http.post("/v1/jobs", json=spec).json()["id"]
    problem(http.post(f"/v1/jobs/{job_id}/pause"), 409)
    problem(http.post(f"/v1/jobs/{job_id}/resume"), 409)
    assert http.delete(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
    document = problem(http.delete(f"/v1/jobs/{job_id}"), 409)
    assert "cancelled" in document["detail"] and "submit a new job" in document["fix"]


def test_queries_are_checked(http: httpx.Client, spec: dict[str, Any]) -> None:
    job_id = http.post("/v1/jobs", json=spec).json()["id"]
    wrong = problem(http.get(f"/v1/jobs/{job_id}/samples?limit=0"), 422)
    assert wrong["detail"] == 'limit: "0": is less than 1.' and wrong["fix"] == "give a number that is at least 1."
    assert [mistake["field"] for mistake in wrong["mistakes"]] == ["limit"]
    several = problem(http.get(f"/v1/jobs/{job_id}/samples?limit=x&step=-1"), 422)
    assert sorted(mistake["field"] for mistake in several["mistakes"]) == ["limit", "step"]
    assert 'limit: "x": is not a whole number. Fix: give a whole number.' in several["detail"].splitlines()
    problem(http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "x"}), 422)
    far = {"Last-Event-ID": "99999999999999999999999-0"}
    assert "last-event-id" in problem(http.get(f"/v1/jobs/{job_id}/events", headers=far), 422)["detail"]
    http.delete(f"/v1/jobs/{job_id}")


def frames(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@scenario
async def test_events_are_followed_and_resumed(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    job_id = await cluster.submit(spec)
    base = f"http://127.0.0.1:{cluster.coordinator.http_port}/v1/jobs/{job_id}"
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        whole = frames((await client.get(f"{base}/events")).text)  # ends with the job
        kinds = [event["kind"] for event in whole]
        assert kinds.count("step.done") == 6 and kinds.count("publication.done") >= 7
        assert whole[-1]["data"]["state"] == "succeeded"
        middle = whole[len(whole) // 2]["id"]
        rest = frames((await client.get(f"{base}/events", headers={"Last-Event-ID": middle})).text)
        assert rest == whole[len(whole) // 2 + 1 :]
        rows = (await client.get(f"{base}/metrics", params={"after": 3})).json()
        assert [row["step"] for row in rows] == [4, 5, 6]
        everything = (await client.get(f"{base}/metrics")).json()
        assert everything[0]["step"] == 0 and "val-core/sums/reward/mean@1" in everything[0]["values"]
        samples = (await client.get(f"{base}/samples", params={"step": 2, "limit": 3})).json()
        assert len(samples) == 3 and all(s["step"] == 2 and s["answer"] == "answer" for s in samples)
        assert samples[0]["versions"] and samples[0]["ground_truth"]


def test_events_of_a_waiting_job_end_where_nobody_follows(http: httpx.Client, spec: dict[str, Any]) -> None:
    job_id = http.post("/v1/jobs", json=spec).json()["id"]
    told = frames(http.get(f"/v1/jobs/{job_id}/events", params={"follow": "false"}).text)
    assert [event["data"]["state"] for event in told] == ["queued"]
    http.delete(f"/v1/jobs/{job_id}")


def test_events_are_told_in_ascii() -> None:
    told = Event(id="1-0", time_s=1.0, message="é\u2028\x85", data=StepDone(step=1, reward=math.nan, seconds=1.0))
    sent = frame(told)
    assert sent.isascii()
    (read,) = frames(sent.decode())
    assert (read["message"], read["kind"], read["data"]["reward"]) == (told.message, "step.done", "NaN")
    assert repr(Event.model_validate(read)) == repr(told)


def test_an_output_is_for_one_job_at_a_time(http: httpx.Client, spec: dict[str, Any], tmp_path: Path) -> None:
    headers = {"Idempotency-Key": f"the first in {spec['output']}"}
    job_id = http.post("/v1/jobs", json=spec, headers=headers).json()["id"]
    Path(spec["output"]).mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(spec["output"])
    for output in (spec["output"], f"{spec['output']}/../out/", str(tmp_path / "link")):
        told = problem(http.post("/v1/jobs", json=spec | {"output": output}), 422)
        assert told["detail"].startswith("output: ") and f"{job_id} is queued and writes there" in told["detail"]
        assert told["fix"] == "give another folder ({id} in its path makes one for each job)."
    assert http.post("/v1/jobs", json=spec, headers=headers).json()["id"] == job_id
    http.delete(f"/v1/jobs/{job_id}")

    other = http.post("/v1/jobs", json=spec).json()["id"]  # the first left no checkpoint there
    told = problem(http.post(f"/v1/jobs/{job_id}/resume"), 409)
    assert f"{other} is queued and writes to its output" in told["detail"]
    http.delete(f"/v1/jobs/{other}")


def test_jobs_are_found_by_tags_that_may_change(http: httpx.Client, spec: dict[str, Any]) -> None:
    def submitted(number: int, *tags: str) -> str:
        tree = spec | {"output": f"{spec['output']}-{number}", "tags": tags, "notes": f"try {number}"}
        return str(http.post("/v1/jobs", json=tree).json()["id"])

    def listed(**query: Any) -> list[str]:
        return [job["id"] for job in http.get("/v1/jobs", params=query).json()["jobs"]]

    one, two, three = submitted(1, "tag-a", "tag-b"), submitted(2, "tag-b"), submitted(3)
    assert listed(tag="tag-b") == [two, one] and listed(tag="tag-a") == [one] and listed(tag="tag-c") == []
    page = http.get("/v1/jobs", params={"tag": "tag-b", "limit": 1}).json()
    assert ([job["id"] for job in page["jobs"]], page["total"]) == ([two], 2)
    assert listed(tag="tag-b", limit=1, cursor=page["next"]) == [one]
    changed = http.patch(f"/v1/jobs/{three}", json={"tags": ["tag-a", "tag-a"]}).json()
    assert (changed["tags"], changed["notes"]) == (["tag-a"], "try 3") and listed(tag="tag-a") == [three, one]
    assert http.patch(f"/v1/jobs/{three}", json={"notes": ""}).json()["notes"] == ""
    told = problem(http.patch(f"/v1/jobs/{three}", json={"tags": ["a b"]}), 422)["detail"]
    assert "tags.0" in told and "a b" in told
    problem(http.patch("/v1/jobs/job-000000000000", json={"notes": "x"}), 404)
    for job in (one, two, three):
        http.delete(f"/v1/jobs/{job}")


def test_an_output_with_placeholders_is_a_folder_for_each_job(http: httpx.Client, spec: dict[str, Any]) -> None:
    tree = spec | {"output": f"{spec['output']}/{{name}}-{{date}}/{{id}}"}
    headers = {"Idempotency-Key": f"placeholders in {spec['output']}"}
    jobs = [http.post("/v1/jobs", json=tree, headers=each).json() for each in (headers, headers, {})]
    assert jobs[0]["id"] == jobs[1]["id"] != jobs[2]["id"]
    day = time.strftime("%Y-%m-%d")
    for job in jobs:
        assert job["spec"]["output"] == f"{spec['output']}/{spec['name'].replace(' ', '-')}-{day}/{job['id']}"
        http.delete(f"/v1/jobs/{job['id']}")


def test_a_used_output_is_told_with_all_other_mistakes(http: httpx.Client, spec: dict[str, Any]) -> None:
    (Path(spec["output"]) / "checkpoints" / "step-1").mkdir(parents=True)
    told = problem(http.post("/v1/jobs", json=spec | {"reward": {"function": "mth"}}), 422)["detail"]
    assert "holds checkpoints of an earlier job" in told and "reward.function" in told


def test_an_output_that_leads_to_itself_keeps_no_other_job_out(http: httpx.Client, spec: dict[str, Any]) -> None:
    job_id = http.post("/v1/jobs", json=spec).json()["id"]
    Path(spec["output"]).symlink_to(spec["output"])
    other = http.post("/v1/jobs", json=spec | {"output": f"{spec['output']}-other"})
    assert other.status_code == 201
    for each in (job_id, other.json()["id"]):
        http.delete(f"/v1/jobs/{each}")


def test_checkpoints_are_not_replaced_by_another_job(http: httpx.Client, spec: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": f"the first in {spec['output']}"}
    saved = Path(spec["output"]) / "checkpoints" / "step-4"
    saved.mkdir(parents=True)
    told = problem(http.post("/v1/jobs", json=spec), 422)
    assert f"{saved.parent} holds checkpoints of an earlier job" in told["detail"]
    assert told["fix"] == "give another folder ({id} in its path makes one for each job), or remove them."

    saved.rmdir()
    job_id = http.post("/v1/jobs", json=spec, headers=headers).json()["id"]
    saved.mkdir()
    http.delete(f"/v1/jobs/{job_id}")
    told = problem(http.post("/v1/jobs", json=spec), 422)
    assert f"`millrace resume {job_id}`, or remove them." in told["fix"]
    assert http.post("/v1/jobs", json=spec, headers=headers).json()["id"] == job_id
    assert http.post(f"/v1/jobs/{job_id}/resume").json()["state"] == "queued"
    http.delete(f"/v1/jobs/{job_id}")


@scenario
async def test_the_fleet_and_prometheus(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(step_s=0.2), await cluster.replica()
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 2)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.coordinator.http_port}", trust_env=False) as http:
        fleet = (await http.get("/v1/fleet")).json()
        assert [m["id"] for m in fleet["trainers"] if m["state"] != "lost"] == [trainer.id]
        (found,) = [m for m in fleet["replicas"] if m["id"] == replica.id]
        assert found["state"] == "serving" and found["version"] >= 1 and found["silent_s"] < 1.0
        targets = (await http.get("/metrics/targets")).json()
        await http.get("/v1/nothing")
        page = (await http.get("/metrics")).text
        address = http.base_url.netloc.decode()
        address = http.base_url.netloc.decode()
        up = await scraped(http, address)
    assert lacking(up, OF_PROMETHEUS) == []
    assert value(up, f'up{{job="millrace-coordinator",instance="{address}",role="coordinator"}}') == 1
    assert f'job="millrace-members",instance="127.0.0.1:9400",role="rollout",member="{replica.id}"' in up
    (target,) = [target for target in targets if target["labels"]["member"] == replica.id]
    assert target == {"targets": ["127.0.0.1:9400"], "labels": {"role": "rollout", "member": replica.id}}
    assert without_data(page, Owner.COORDINATOR) == []
    assert value(page, f'millrace_events_total{{job_id="{job_id}",kind="step.done"}}') >= 2
    assert value(page, f'millrace_events_total{{job_id="{job_id}",kind="trainer.lost"}}') == 0
    assert value(page, 'millrace_http_seconds_count{code="200",method="GET",route="/v1/fleet"}') >= 1
    assert value(page, 'millrace_http_seconds_count{code="404",method="GET",route="unknown"}') >= 1
    assert value(page, 'millrace_grpc_seconds_count{code="OK",method="Fleet/Register"}') >= 2
    assert value(page, "millrace_redis_seconds_count") > 10 and value(page, "millrace_redis_memory_bytes") > 1e5
    assert value(page, "millrace_redis_clients") >= 1 and 'service="coordinator"} 1.0' in page
    for name in ("millrace_jobs", "millrace_prompts", "millrace_groups_total", "millrace_members", "millrace_epoch"):
        assert f"\n{name}" in page, name
    assert f'millrace_job_step{{job_id="{job_id}"}}' in page
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED


def test_health_docs_and_page(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    document = http.get("/openapi.json")
    assert "$defs" not in document.text and "prompts_per_step" in document.text
    paths = document.json()["paths"]
    assert set(paths["/v1/jobs/{job_id}"]) == {"get", "delete", "patch"}
    for path, verbs in paths.items():
        for verb, operation in verbs.items():
            assert operation.get("description") or operation.get("summary"), (verb, path)
    stream = paths["/v1/jobs/{job_id}/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert stream["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/Event"}
    missing = paths["/v1/jobs/{job_id}/events"]["get"]["responses"]["404"]["content"]
    assert missing == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    schemas = document.json()["components"]["schemas"]
    payloads = [schema.get("properties", {}).get("kind", {}).get("const") for schema in schemas.values()]
    assert set(EventKind) <= set(payloads)
    assert set(re.findall(r'"#/components/schemas/(\w+)"', document.text)) <= set(schemas)
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text.replace("http://www.w3.org", "") and "https://" not in page.text


def test_a_token_is_asked_for_where_there_is_one(tmp_path: Path, spec: dict[str, Any]) -> None:
    with running(tmp_path / "state", environment={"MILLRACE_TOKEN": "secret"}) as coordinator:
        base = f"http://127.0.0.1:{coordinator.http_port}"
        with httpx.Client(base_url=base, trust_env=False) as http:
            assert "token" in problem(http.get("/v1/jobs"), 401)["detail"]
            problem(http.get("/v1/fleet", headers={"Authorization": "Bearer wrong"}), 401)
            assert http.get("/v1/jobs", headers={"Authorization": "Bearer secret"}).status_code == 200
            behind_a_proxy = {"Host": "mill.example.org", "Origin": "https://else.example.org"}
            assert http.get("/v1/jobs", headers={"Authorization": "Bearer secret"} | behind_a_proxy).status_code == 200
            assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
        assert "secret" not in coordinator.log()


@scenario
async def test_a_job_that_is_told_to_stop_is_told_apart_from_one_that_ends(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer(step_s=0.3), await cluster.replica()
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    cancelled = await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    assert cancelled.state in (JobState.RUNNING, JobState.CANCELLED)
    with suppress(InvalidState):  # it may have ended since the first answer
        assert (await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)).id == job_id
    assert (await cluster.ended(job_id)).state is JobState.CANCELLED
