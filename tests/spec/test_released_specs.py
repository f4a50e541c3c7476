"""Job specs between releases: what a coordinator of this one sends is taken by members of earlier ones, if the job uses
no newer field, and means the same there; what they wrote is read here."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from millrace.spec import JobSpec, received
from millrace.spec.migrations import RENAMED
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


def test_the_whole_spec_is_not_for_members_of_an_earlier_release() -> None:
    """It has every field."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(record(OLD).spec_json), schema(RELEASES[0]))


@pytest.mark.parametrize("release", RELEASES[:1], ids=lambda path: path.name)
@pytest.mark.parametrize("field", NEWER)
def test_they_refuse_a_newer_field_by_its_name(field: str, release: Path) -> None:
    job = record(OLD | {field: NEWER[field]})
    with pytest.raises(jsonschema.ValidationError, match=field):
        jsonschema.validate(json.loads(job.spec_for_members), schema(release))


def forms(whole: dict[str, Any]) -> dict[str, set[str]]:
    """What each field of a schema of specs may hold: the kinds of JSON, and the values of an enumeration."""
    found = defaultdict[str, set[str]](set)

    def below(level: dict[str, Any], path: str, within: tuple[str, ...] = ()) -> None:
        if (reference := level.get("$ref")) is not None:
            if reference not in within:
                below(whole["$defs"][reference.rpartition("/")[2]], path, (*within, reference))
            return
        for each in (*level.get("anyOf", ()), *level.get("oneOf", ())):
            below(each, path, within)
        values = level.get("enum", [level["const"]] if "const" in level else [])
        found[path] |= {f"= {value!r}" for value in values} or ({level["type"]} if "type" in level else set())
        for name, field in level.get("properties", {}).items():
            below(field, f"{path}.{name}".lstrip("."), within)
        for name, kind in (("[]", "items"), ("{}", "additionalProperties")):
            if isinstance(level.get(kind), dict):
                below(level[kind], path + name, within)

    below(whole, "")
    return dict(found)


def narrowed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Every field of a schema that is gone in a newer one, or may not hold any more what it did."""
    now = forms(new)
    for path, held in forms(old).items():
        if path not in now:
            yield f"{path} is gone"
        elif lost := held - now[path] - ({"integer"} if "number" in now[path] else set()):
            texts = {one for one in lost if one.startswith("= '")} if "string" in now[path] else set()
            yield from (f"{path}: {one}" for one in sorted(lost - texts))


def test_narrowed_tells_what_an_older_spec_would_not_survive() -> None:
    old = schema(RELEASES[-1])
    changed = json.loads(json.dumps(old))
    del changed["properties"]["tags"]
    changed["properties"]["notes"] = {"type": "integer"}
    changed["$defs"]["Schedule"]["properties"]["steps"] = {"anyOf": [{"type": "number"}, {"type": "null"}]}  # wider
    changed["$defs"]["Schedule"]["properties"]["max_staleness"] = {"enum": [0, 1]}
    assert list(narrowed(old, old)) == []
    told = ["notes: string", "schedule.max_staleness: integer", "tags is gone", "tags[] is gone"]
    assert sorted(narrowed(old, changed)) == told


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_every_field_of_a_release_is_still_read(release: Path) -> None:
    known = {f"{one.level.replace('.*', '[]')}.{one.old} is gone" for one in RENAMED}
    known.add("algorithm.preset: string")  # 0.1 had the same names, and looked at them after the schema
    assert set(narrowed(schema(release), JobSpec.model_json_schema())) <= known


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
