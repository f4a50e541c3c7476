"""Users: what each role may do at every endpoint, whose jobs a user sees, and what the audit log says."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from millrace.cli import app as command
from millrace.client import Client
from millrace.errors import InvalidState, MillraceError, NotFound
from millrace.rest.users import FLEET, Role
from services.coordinator.rest.app import application
from services.coordinator.rest.users import ROLES, check_table
from tests.services.coordinator.conftest import CoordinatorProcess, running

ADMIN = "the-token-of-the-services"
UNKNOWN = "job-000000000000"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    environment = {"MILLRACE_TOKEN": ADMIN, "MILLRACE_TOKEN_FILE": ""}
    with running(tmp_path_factory.mktemp("users"), environment=environment) as process:
        yield process


@pytest.fixture(scope="module")
def url(coordinator: CoordinatorProcess) -> str:
    return f"http://127.0.0.1:{coordinator.http_port}"


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def admin(url: str) -> Iterator[Client]:
    with Client(url, ADMIN) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(admin: Client) -> dict[Role, str]:
    """A token of each role."""
    return {role: admin.add_user(f"of-{role}", role).token for role in Role}


def asked(http: httpx.Client, token: str, method: str, path: str) -> httpx.Response:
    """The answer to a request with nothing in it."""
    filled = path.format(job_id=UNKNOWN, member_id="nobody", name="nobody", record="1-0", prompt_id="0-1", number=1)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return http.request(method, filled, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), [*ROLES])
def test_each_role_may_do_what_the_table_says(
    method: str, path: str, http: httpx.Client, tokens: dict[Role, str]
) -> None:
    assert asked(http, "", method, path).status_code == 401
    assert asked(http, "mr_nobody", method, path).status_code == 401
    for role, token in tokens.items():
        answer = asked(http, token, method, path)
        assert (answer.status_code != 403) == role.allows(ROLES[method, path]), (role, answer.text)
        assert answer.status_code != 401


def test_no_endpoint_can_be_forgotten() -> None:
    class Absent(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return Absent()

        def __call__(self, *_: Any) -> None: ...

    absent: Any = Absent()
    application(absent, absent, absent, absent, "127.0.0.1")
    with pytest.raises(MillraceError, match="POST /v1/new"):
        check_table({*ROLES, ("POST", "/v1/new")})


@pytest.mark.slow
def test_users_see_their_own_jobs_only(
    url: str, http: httpx.Client, admin: Client, tokens: dict[Role, str], spec: dict[str, Any]
) -> None:
    alice, bob = (Client(url, admin.add_user(name).token) for name in ("alice", "bob"))
    with alice, bob:
        job = alice.submit(spec, key="mine")
        assert job.user == "alice" and alice.submit(spec, key="mine").id == job.id
        other = bob.submit(spec | {"output": f"{spec['output']}-bob", "name": "other"}, key="mine")
        assert other.user == "bob" and other.id != job.id
        assert [each.id for each in alice.jobs()] == [job.id] and [each.id for each in bob.jobs()] == [other.id]
        assert {each.id for each in admin.jobs()} >= {job.id, other.id}
        with Client(url, admin.new_token("alice", Role.READ).token) as looking:
            assert looking.job(job.id).user == "alice"
            with pytest.raises(InvalidState, match="needs the role submit, and this token has read"):
                looking.cancel(job.id)
        for client, own, foreign in ((alice, job, other), (bob, other, job)):
            told = "".join(event.model_dump_json() for event in client.events(own.id, follow=False))
            told += client.job(own.id).model_dump_json()
            assert foreign.id not in told
        headers = {"Authorization": f"Bearer {bob._secret()}"}
        for method, path in ROLES:
            if "{job_id}" in path:
                filled = path.format(job_id=job.id, record="1-0", prompt_id="0-1", number=1)
                answer = http.request(method, filled, headers=headers)
                assert answer.status_code == 404, (method, path, answer.text)
                assert job.name not in answer.text
        assert alice.cancel(job.id).user == "alice" and admin.cancel(other.id).id == other.id
        told = [(entry.user, entry.method, entry.path, entry.status) for entry in admin.audit()]
        assert ("alice", "DELETE", f"/v1/jobs/{job.id}", 200) in told
        assert ("alice", "DELETE", f"/v1/jobs/{job.id}", 403) in told
        assert ("bob", "DELETE", f"/v1/jobs/{job.id}", 404) in told
        assert (FLEET, "DELETE", f"/v1/jobs/{other.id}", 200) in told
        assert [entry.user for entry in admin.audit() if entry.made == f"/v1/jobs/{job.id}"] == ["alice", "alice"]


@pytest.mark.slow
def test_tokens_end_with_their_user_and_with_their_successor(http: httpx.Client, admin: Client) -> None:
    def valid(token: str) -> bool:
        return asked(http, token, "GET", "/v1/fleet").status_code == 200

    first = admin.add_user("carol")
    second = admin.new_token("carol")
    assert valid(first.token) and valid(second.token) and not valid(first.token + "x")
    third = admin.new_token("carol", replace=True)
    assert not valid(first.token) and not valid(second.token) and valid(third.token)
    with pytest.raises(InvalidState, match="role: admin: user carol has the role submit"):
        admin.new_token("carol", Role.ADMIN)
    with pytest.raises(InvalidState, match="there is a user carol already"):
        admin.add_user("carol")
    with pytest.raises(InvalidState, match="stands for the token of the services"):
        admin.add_user(FLEET)
    admin.remove_user("carol")
    assert not valid(third.token)
    admin.add_user("carol")
    assert not valid(third.token)
    with pytest.raises(NotFound, match="there is no user nobody"):
        admin.remove_user("nobody")


@pytest.mark.slow
def test_tokens_are_stored_as_hashes_and_logged_nowhere(coordinator: CoordinatorProcess, admin: Client) -> None:
    made = admin.add_user("dave")
    with Client(admin.url, made.token) as dave:
        dave.fleet()
    assert made.token not in coordinator.log()
    assert not any(made.token in entry.model_dump_json() for entry in admin.audit())
    assert made.token.encode() not in b"".join(
        path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()
    )


@pytest.mark.slow
def test_the_command(url: str) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(command, ["users", *arguments, "--url", url], env={"MILLRACE_TOKEN": ADMIN})
        assert result.exit_code == 0, result.output
        return result.output

    made = json.loads(run("add", "erin", "--role", "read", "--json"))
    assert made["role"] == "read" and made["token"].startswith("mr_")
    assert made["id"] in run("list") and "erin" in run("list")
    assert run("token", "erin").count("mr_") == 1
    assert "erin is removed" in run("remove", "erin") and "erin" not in run("list")
    assert "/v1/users/erin" in run("audit")
