"""The command against a real coordinator with its real Redis; nobody is in its fleet, so jobs wait."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from millrace import __version__
from millrace.cli import app
from millrace.client import Client
from millrace.demo.tasks import TASKS, write_task_data
from millrace.errors import InvalidJob, InvalidState, NotFound
from millrace.spec import load
from millrace.wire.channel import PROTOCOL_VERSION
from tests.cli.test_completion import offered
from tests.forked import run_forked
from tests.models import save_tiny_model
from tests.services.coordinator.conftest import running

pytestmark = pytest.mark.slow

COMMAND = str(Path(sys.executable).with_name("millrace"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("coordinator")) as coordinator:
        yield coordinator.client.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    train, held_out = write_task_data(TASKS["reverse"], folder, seed=0, train=8, held_out=4)
    return {
        "name": "words",
        "output": str(folder / "output"),
        "model": {"path": str(save_tiny_model(folder / "model", tied=True))},
        "data": {"files": [str(train)], "max_prompt_tokens": 48},
        "evaluation": {"files": [str(held_out)]},
        "reward": {"function": "exact"},
        "rollout": {"max_response_tokens": 10},
        "schedule": {"steps": 2, "prompts_per_step": 4},
    }


@pytest.fixture
def job_file(spec: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def millrace(*arguments: str, url: str = "", status: int = 0) -> Any:
    result = CliRunner().invoke(app, [*arguments, *(["--url", url] if url else [])], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def test_submit_show_list_and_cancel(url: str, client: Client, job_file: Path) -> None:
    submitted = millrace("submit", str(job_file), url=url).stdout
    job = re.findall(r"job-[0-9a-f]{12}", submitted)[0]
    listed = millrace("jobs", url=url).stdout
    assert re.search(rf"{job} +words +(queued|starting) +0/", listed)
    assert re.search(r"AGE +QUEUED +RAN +WAITS FOR *\n.* \d+s +\d+s +– +trainer *\n", listed)
    shown = millrace("show", "last", url=url).stdout
    assert job in shown and "0 issued = 0 queued" in shown and "words" in shown
    assert "cancelled" in millrace("cancel", job, url=url).stdout or client.wait(job, 30).state == "cancelled"
    events = millrace("events", job, url=url).stdout
    assert "words was submitted" in events and "cancelled" in events


def test_a_sweep_is_a_job_for_each_value(url: str, client: Client, job_file: Path) -> None:
    options = ("--set", "data.seed=1,2", "--set", "schedule.steps=3")
    jobs = json.loads(millrace("submit", str(job_file), *options, "--json", url=url).stdout)
    assert [job["name"] for job in jobs] == ["words-seed-1", "words-seed-2"]
    assert [Path(job["spec"]["output"]).name for job in jobs] == ["seed-1", "seed-2"]
    assert [(job["spec"]["data"]["seed"], job["spec"]["schedule"]["steps"]) for job in jobs] == [(1, 3), (2, 3)]
    for job in jobs:
        client.cancel(job["id"])
    assert "millrace top" in millrace("submit", str(job_file), *options, "--watch", url=url, status=1).stderr


def test_notes_and_tags_of_a_job(url: str, client: Client, spec: dict[str, Any]) -> None:
    job = client.submit({**spec, "name": "noted", "tags": ["first"]}).id
    changes = ("--tag", "bad", "--untag", "first", "--untag", "bad")
    assert "tags: none" in millrace("note", job, "lr too high", *changes, url=url).stdout
    assert "lr too high" in millrace("note", job, "--tag", "kept", url=url).stdout
    assert "noted" in millrace("jobs", "--tag", "kept", url=url).stdout
    assert "with the tag first" in millrace("jobs", "--tag", "first", url=url).stdout
    assert "lr too high" in millrace("show", job, url=url).stdout
    client.cancel(job)


def test_a_shell_completes_jobs(url: str, client: Client, spec: dict[str, Any]) -> None:
    job = client.submit({**spec, "name": "completed"}).id
    assert offered(f"millrace show --url {url} {job[:7]}")[0] == job
    assert offered(f"millrace compare --url {url} last compl") == ["completed"]
    assert offered("millrace cancel la", MILLRACE_URL=url) == ["last"]
    client.cancel(job)


def test_jobs_are_compared_by_what_differs(url: str, client: Client, spec: dict[str, Any]) -> None:
    names = ("left", "right")
    one, other = (client.submit({**spec, "name": name, "output": f"{spec['output']}-{name}"}) for name in names)
    compared = json.loads(millrace("compare", "left", "right", "--json", url=url).stdout)
    assert compared["jobs"] == [one.id, other.id] and set(compared["spec"]) == {"name", "output"}
    assert "Neither job has trained a step." in millrace("compare", "left", "left", url=url).stdout
    for job in (one, other):
        client.cancel(job.id)


def test_a_waiting_job_is_on_top_and_has_a_report(
    url: str, client: Client, spec: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit({**spec, "name": "reported", "output": f"{spec['output']}-reported"}).id
    shown = millrace("top", "--once", url=url).stdout
    assert re.search(rf"{job} +reported +(queued|starting) +0/", shown) and "No trainers or replicas" in shown
    assert job in [each["id"] for each in json.loads(millrace("top", "--json", url=url).stdout)["jobs"]]
    made = json.loads(millrace("report", job, "-o", str(tmp_path / "report.html"), "--json", url=url).stdout)
    page = Path(made["path"]).read_text()
    assert made["bytes"] == len(page.encode()) and '"name":"reported"' in page and '"schedule":' in page
    client.cancel(job)


def test_json_is_for_programs(url: str, client: Client, job_file: Path) -> None:
    job = json.loads(millrace("submit", str(job_file), "--json", url=url).stdout)
    assert job["id"] in [row["id"] for row in json.loads(millrace("jobs", "--json", url=url).stdout)]
    shown = json.loads(millrace("show", job["id"], "--json", url=url).stdout)
    assert shown["job"]["id"] == job["id"] and shown["ledger"]["issued"] == 0
    assert json.loads(millrace("fleet", "--json", url=url).stdout) == {"epoch": 0, "trainers": [], "replicas": []}
    events = [json.loads(line) for line in millrace("events", job["id"], "--json", url=url).stdout.splitlines()]
    assert events[0]["kind"] == "job.state"
    told = millrace("show", "nothing", "--json", url=url, status=1).stderr
    assert json.loads(told)["error"] == "NotFound"
    client.cancel(job["id"])


def test_jobs_are_listed_by_state_and_number(url: str, client: Client, spec: dict[str, Any]) -> None:
    ids = [client.submit({**spec, "output": f"{spec['output']}-{n}"}).id for n in range(2)]
    for job_id in ids:
        client.cancel(job_id)
        client.wait(job_id, 30)
    (newest,) = json.loads(millrace("jobs", "--limit", "1", "--json", url=url).stdout)
    assert newest["id"] == ids[1] and "spec" not in newest
    assert "Only the newest 1 are listed" in millrace("jobs", "--limit", "1", url=url).stdout
    listed = json.loads(millrace("jobs", "--all", "--state", "cancelled", "--json", url=url).stdout)
    assert [job["id"] for job in listed][:2] == ids[::-1]
    assert millrace("jobs", "--state", "paused", url=url).stdout == "No job is paused.\n"


def test_the_same_key_is_the_same_job(url: str, client: Client, spec: dict[str, Any]) -> None:
    elsewhere = {**spec, "output": f"{spec['output']}-other"}
    one, same, other = client.submit(spec, "k1"), client.submit(spec, "k1"), client.submit(elsewhere, "k2")
    assert one.id == same.id != other.id
    with pytest.raises(InvalidState):
        client.submit({**spec, "name": "another"}, "k1")
    for job in (one, other):
        client.cancel(job.id)


def test_jobs_are_named_by_id_beginning_of_it_or_last(url: str, client: Client, spec: dict[str, Any]) -> None:
    job = client.submit({**spec, "name": "named"}).id
    for name in (job, job[:9], job.removeprefix("job-")[:5], "named", "last"):
        assert json.loads(millrace("show", name, "--json", url=url).stdout)["job"]["id"] == job
    misspelt = millrace("show", "namde", url=url, status=1).stderr
    assert "there is no job 'namde'" in misspelt and "did you mean `named`?" in misspelt
    client.cancel(job)
    several = millrace("show", "job-", url=url, status=1).stderr
    assert "could be job-" in several and "Fix: give more of the id." in several
    assert "`millrace jobs` lists the jobs" in millrace("show", "nothing", url=url, status=1).stderr
    assert (
        "list the jobs with `millrace jobs` or GET /v1/jobs."
        in millrace("show", "job-000000000000", url=url, status=1).stderr
    )


def test_what_the_coordinator_refuses_is_told_with_its_fix(url: str, client: Client, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="no-such-folder"):
        client.submit({**spec, "model": {"path": "/no-such-folder"}})
    with pytest.raises(NotFound):
        client.job("job-000000000000")
    job = client.submit(spec).id
    client.cancel(job)
    client.wait(job, 30)
    refused = millrace("pause", job, url=url, status=1).stderr
    assert f"{job} is cancelled and cannot be paused" in refused and "Fix:" in refused


def test_a_cancelled_job_is_resumed_as_its_refusal_says(url: str, client: Client, spec: dict[str, Any]) -> None:
    job = client.submit(spec).id
    client.cancel(job)
    refused = millrace("cancel", job, url=url, status=1).stderr
    assert f"continue it with `millrace resume {job}`" in refused
    assert millrace("resume", job, url=url).stdout.split() == [job, "queued"]
    client.cancel(job)
    changes = ("--set", "trainer.token_budget=4096", "--set", "deadlines={step_s: 9}", "--set", "deadlines.save_s=8")
    assert millrace("resume", job, *changes, url=url).stdout.split() == [job, "queued"]
    changed = client.job(job).spec
    assert changed["trainer"]["token_budget"] == 4096
    assert (changed["deadlines"]["step_s"], changed["deadlines"]["save_s"]) == (9, 8)
    client.cancel(job)
    for wrong, told in {
        "trainer": "--set: trainer: has no field and value",
        "data.files=[]": "data.files: a job that is",
    }.items():
        assert told in millrace("resume", job, "--set", wrong, url=url, status=1).stderr


def test_submit_and_validate_put_values_over_those_of_the_file(url: str, client: Client, job_file: Path) -> None:
    told = millrace("submit", str(job_file), "--set", "trainer.token_budget=4k", url="http://127.0.0.1:9", status=1)
    assert 'trainer.token_budget: "4k": ' in told.stderr and "(line" not in told.stderr
    changes = ("--set", "schedule.steps=7", "--set", "trainer.optimizer.lr=2e-5", "--set", "name=set")
    checked = json.loads(millrace("validate", str(job_file), *changes, "--fields-only", "--json").stdout)
    assert (checked["name"], checked["schedule"]["steps"]) == ("set", 7)
    job = client.job(json.loads(millrace("submit", str(job_file), *changes, "--json", url=url).stdout)["id"])
    schedule = job.spec["schedule"]
    assert (job.name, schedule["steps"], schedule["prompts_per_step"]) == ("set", 7, 4)
    assert job.spec["trainer"]["optimizer"]["lr"] == 2e-5
    client.cancel(job.id)


def test_a_bad_file_never_reaches_the_coordinator(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nmodle: {path: y}\n")
    told = millrace("submit", str(tmp_path / "job.yaml"), url="http://127.0.0.1:9", status=1).stderr
    assert "did you mean `model`?" in told and "data: is missing" in told


def test_watching_ends_with_the_job_and_its_status_tells_how(url: str, client: Client, job_file: Path) -> None:
    argv = (COMMAND, "submit", str(job_file), "--watch", "--url", url)
    watching = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert "words was submitted" in watching.stdout.readline()
    client.cancel(client.jobs()[0].id)
    told, _ = watching.communicate(timeout=30)
    assert watching.returncode == 1
    assert "cancelled at step 0" in told and "\x1b" not in told


def test_an_interrupt_only_detaches(url: str, client: Client, job_file: Path) -> None:
    argv = (COMMAND, "submit", str(job_file), "--watch", "--url", url)
    # A shell that put this test into the background has it ignore interrupts, and what it starts too.
    with_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    watching = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=with_interrupts)
    assert watching.stdout is not None
    assert "words was submitted" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    told, _ = watching.communicate(timeout=30)
    job = client.jobs()[0]
    assert watching.returncode == 0 and f"detached; {job.id} continues" in told
    assert job.state in ("queued", "starting")
    client.cancel(job.id)


def test_validate_tells_every_mistake_or_that_there_is_none(spec: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**spec, "output": str(tmp_path / "fresh" / "output")}))
    assert "model, data and reward are usable" in millrace("validate", str(file)).stdout
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"], "it makes no folder"
    assert json.loads(millrace("validate", "--fields-only", str(file), "--json").stdout)["name"] == "words"
    broken = {**spec, "model": {"path": "/no-such-folder"}, "reward": {"function": "exakt"}}
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(broken))
    told = millrace("validate", str(tmp_path / "broken.yaml"), status=1).stderr
    assert "/no-such-folder" in told and "did you mean `exact`?" in told
    valid = millrace("validate", "--fields-only", "--trainer-gpus", "16", str(tmp_path / "broken.yaml")).stdout
    assert "the fields are valid" in valid and "trainer.backend_options.fsdp_size: null: weights are gathered" in valid


def test_validate_and_submit_tell_with_which_values_an_adapter_learns_slowly(
    url: str, client: Client, spec: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec | {"model": {**spec["model"], "lora": {"rank": 8}}}))
    for command in (("validate", "--fields-only"), ("submit",)):
        told = millrace(*command, str(file), url=url if "submit" in command else "").stdout
        assert "model.lora.rank: 8: " in told and "trainer.optimizer.lr: 1e-06: " in told
    client.cancel(client.jobs(limit=1)[0].id)
    job = client.submit(load(file))
    assert [each.field for each in job.advice] == ["model.lora.rank", "trainer.optimizer.lr"]
    client.cancel(job.id)


def test_without_a_coordinator_the_fix_is_to_start_one() -> None:
    told = millrace("jobs", url="http://127.0.0.1:9", status=1).stderr
    assert "did not answer GET /v1/jobs within 2 s" in told and "millrace up" in told


def test_every_command_explains_itself(capfd: pytest.CaptureFixture[str]) -> None:
    for command in app.registered_commands:
        name = command.name or ""
        told = millrace(name, "--help").stdout + capfd.readouterr().out  # `export` is a process of its own
        assert "Usage:" in told and len(told.splitlines()) > 8, name


def test_an_engine_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    told = millrace("up", "--engine", "vllmm", "--state", str(tmp_path), status=1).stderr
    assert "did you mean `vllm`?" in told and not os.listdir(tmp_path)


def test_an_export_needs_no_coordinator(tmp_path: Path) -> None:
    done = run_forked("millrace", "export", tmp_path, tmp_path / "out")
    assert done.returncode == 1 and done.stdout == ""
    assert f"{tmp_path} is not a checkpoint" in done.stderr and "Fix: give OUTPUT/checkpoints/step-N" in done.stderr


def test_a_misspelt_command_or_option_gets_a_suggestion() -> None:
    assert "Did you mean 'submit'?" in millrace("sumbit", status=2).stderr
    assert "--url" in millrace("jobs", "--ulr", "x", status=2).stderr


@pytest.mark.parametrize("program", ["millrace", "services.coordinator", "services.trainer", "services.rollout"])
def test_the_command_and_every_service_tell_their_version(program: str) -> None:
    done = subprocess.run([sys.executable, "-m", program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"millrace {__version__}, protocol {PROTOCOL_VERSION}\n"
