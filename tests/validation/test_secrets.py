"""Secrets by reference: who may name which, what comes of it, and that no error shows a value."""

import os
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from millrace.errors import InvalidJob
from millrace.validation.secrets import LARGEST_FILE, SecretReference, secret, secret_of_job


def refusal(reference: str) -> str:
    with pytest.raises(InvalidJob) as error:
        secret_of_job(reference, "webhooks.0.secret")
    assert str(error.value).startswith("webhooks.0.secret: ") and "Fix: " in str(error.value)
    return str(error.value)


def test_the_value_of_a_variable_or_a_file_is_read_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEAM_KEY", "s3cret")
    (tmp_path / "key").write_text("  s3cret\n")
    for reference in ("env:TEAM_KEY", f"file:{tmp_path}/key"):
        found = secret_of_job(reference, "f")
        assert found.get_secret_value() == "s3cret" and "s3cret" not in f"{found} {found!r}"


@pytest.mark.parametrize("written", ["s3cret", "env:", "env:A-B", "file:relative", "file:/a\nb", "https://a/b"])
def test_a_secret_itself_is_no_reference(written: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(SecretReference).validate_python(written)


def test_what_cannot_be_read_is_told_without_its_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEAM_KEY", "two\ns3crets")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("x" * (LARGEST_FILE + 1))
    assert "there is no such environment variable" in refusal("env:NO_SUCH_VARIABLE")
    assert "No such file" in refusal(f"file:{tmp_path}/none")
    assert "not a regular file" in refusal(f"file:{tmp_path}/fifo")
    assert "Is a directory" in refusal(f"file:{tmp_path}") or "not a regular file" in refusal(f"file:{tmp_path}")
    assert "more than 65536 bytes" in refusal(f"file:{tmp_path}/large")
    assert "line breaks" in (told := refusal("env:TEAM_KEY")) and "s3cret" not in told


def test_jobs_name_no_secret_of_the_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    monkeypatch.setenv("MILLRACE_TOKEN", "s3cret")
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(tmp_path / "token"))
    for reference in ("env:MILLRACE_TOKEN", "env:REDIS_URL", f"file:{tmp_path}/token", f"file:{tmp_path}/link"):
        assert "is a secret of the services" in refusal(reference)
    assert secret("env:MILLRACE_TOKEN", "MILLRACE_WEBHOOKS").get_secret_value() == "s3cret"  # the operator may


def test_the_operator_says_which_secrets_jobs_may_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "key").write_text("s3cret")
    (tmp_path / "ours" / "out").symlink_to(tmp_path / "theirs" / "key")
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    monkeypatch.setenv("OTHER_KEY", "s3cret")
    monkeypatch.setenv("MILLRACE_JOB_SECRETS", f"env:JUDGE_*, file:{tmp_path}/ours")
    for allowed in ("env:JUDGE_KEY", f"file:{tmp_path}/ours/key"):
        assert secret_of_job(allowed, "f").get_secret_value() == "s3cret"
    for reference in ("env:OTHER_KEY", f"file:{tmp_path}/theirs/key", f"file:{tmp_path}/ours/out"):
        assert "jobs may not name this secret" in (told := refusal(reference)) and "MILLRACE_JOB_SECRETS" in told


def test_files_lie_below_the_roots_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "key").write_text("s3cret")
    (tmp_path / "key").write_text("s3cret")
    monkeypatch.setenv("MILLRACE_ROOTS", str(tmp_path / "roots"))
    assert secret_of_job(f"file:{tmp_path}/roots/key", "f")
    assert "lies outside the folders" in refusal(f"file:{tmp_path}/key")
