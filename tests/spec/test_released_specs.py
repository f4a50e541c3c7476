"""Job specs between releases: what a coordinator of this one sends is taken by members of earlier ones, if the job uses
no newer field, and means the same there; what they wrote is read here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from millrace.spec import JobSpec, received
from millrace.validation.fields import field_at
from services.coordinator.state.job import JobRecord
from tests.services.coordinator.redis import a_job

ROOT = Path(__file__).resolve().parents[2]
RELEASES = sorted((ROOT / "proto" / "released").iterdir())
PRESETS = sorted(path for folder in ("presets", "recipes") for path in (ROOT / folder).rglob("*.yaml"))
OLD = {
    "name": "sums",
    "output": "/out",
    "model": {"path": "/model"},
    "data": {"files": ["/train.parquet"]},
    "algorithm": {"preset": "dapo", "policy_loss": {"name": "clip", "options": {"clip_low": 0.1}}},
    "rollout": {"samples_per_prompt": 4, "engine_options": {"max_num_seqs": 8}},
    "schedule": {"steps": 3, "save_every_steps": 1},
    "evaluation": {"files": ["/held_out.parquet"]},
}
"""The job of every release's job.json."""
NEWER = {"webhooks": [{"url": "https://hooks.example.com"}], "notes": "a note", "tags": ["baseline"]}


def schema(release: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / "job.schema.json").read_text())
    return found


def record(tree: dict[str, Any]) -> JobRecord:
    """A job as the coordinator stores it."""
    spec = JobSpec.model_validate(tree).model_dump_json()
    return JobRecord.of({"id": a_job().id, "name": "sums", "state": "queued", "created_s": "1", "spec_json": spec})


def released_defaults(release: Path) -> Iterator[tuple[str, Any]]:
    """Path and default of every field of the release's specs that has a plain default."""
    whole = schema(release)

    def below(level: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
        for name, field in level.get("properties", {}).items():
            if "default" in field and not isinstance(field["default"], dict):
                yield above + name, field["default"]
            for each in (field, *field.get("anyOf", [])):
                if (reference := each.get("$ref")) is not None:
                    yield from below(whole["$defs"][reference.rpartition("/")[2]], f"{above}{name}.")

    return below(whole, "")


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_members_of_a_release_take_jobs_without_newer_fields(release: Path) -> None:
    job, old = record(OLD), schema(release)
    jsonschema.validate(json.loads(job.spec_for_members), old)
    assert received(job.spec_for_members) == job.spec
    with pytest.raises(jsonschema.ValidationError):  # the whole spec has every field
        jsonschema.validate(json.loads(job.spec_json), old)


@pytest.mark.parametrize("release", RELEASES[:1], ids=lambda path: path.name)
@pytest.mark.parametrize("field", NEWER)
def test_they_refuse_a_newer_field_by_its_name(field: str, release: Path) -> None:
    job = record(OLD | {field: NEWER[field]})
    with pytest.raises(jsonschema.ValidationError, match=field):
        jsonschema.validate(json.loads(job.spec_for_members), schema(release))


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_default_that_is_not_sent_means_the_same_there(release: Path) -> None:
    compared = 0
    for path, default in released_defaults(release):
        field = field_at(JobSpec, path.split("."))
        if field is None or field.is_required():
            continue  # it has another name now: millrace/spec/migrations.py
        now = json.loads(json.dumps(field.get_default(call_default_factory=True), default=lambda model: None))
        assert now == default, f"{path}: its default was {default!r} in {release.name}"
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_what_a_release_stored_is_read(release: Path) -> None:
    assert received((release / "job.json").read_text()) == JobSpec.model_validate(OLD)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_what_is_sent_is_the_job(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    if "model" not in tree:
        pytest.skip("is no job spec")
    job = record(tree)
    assert received(job.spec_for_members) == job.spec and len(job.spec_for_members) < len(job.spec_json)
