"""Models and data files by their names on a hub: `huggingface_hub` itself, in a process of its own, and a server that
speaks the hub's API."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.hub import HubName
from tests.hub_server import COMMIT, LATER, Hub, Repository, serving
from tests.models import save_tiny_model
from tests.small_disk import small_disk

ROW = {"data_source": "sums", "prompt": "1 + 1 =", "reward_model": {"style": "exact", "ground_truth": "2"}}
DATA = "hf://datasets/someone/sums/part/train.jsonl"
PINNED = {"model": f"hf://someone/tiny@{COMMIT}", "data": f"hf://datasets/someone/sums@{COMMIT}/part/train.jsonl"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_tiny_model(tmp_path_factory.mktemp("hub") / "model", tied=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with serving() as running:
        model = {COMMIT: {**files, "onnx/model.json": b"{}"}, LATER: {**files, "README.txt": b"later"}}
        running.repositories = {
            "models/someone/tiny": Repository(model, {"main": COMMIT, "v2": LATER}),
            "models/someone/gated": Repository(model, {"main": COMMIT}, gated=True),
            "models/someone/pickled": Repository({COMMIT: {"config.json": b"{}"}}, {"main": COMMIT}),
            "datasets/someone/sums": Repository(
                {COMMIT: {"part/train.jsonl": json.dumps(ROW).encode()}}, {"main": COMMIT}
            ),
        }
        yield running


def asked(script: str, hub: Hub, home: Path, job: Mapping[str, str] | None = None, offline: bool = False) -> Any:
    """What `script` prints as JSON for one job."""
    return asked_of([job or {}], script, hub, home, offline)[0]


def asked_of(jobs: Sequence[Mapping[str, str]], script: str, hub: Hub, home: Path, offline: bool = False) -> list[Any]:
    """What `script` gives for each job, or its error, in one process whose cache is in `home`. In the script `spec` is
    a job, `tree` the same as plain mappings, and `hub` the module."""
    trees = [
        {
            "name": "test",
            "output": str(home / "output"),
            "model": {"path": job.get("model", "someone/tiny")},
            "data": {"files": [job.get("data", DATA)], "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 64},
            "reward": {"function": "exact"},
        }
        for job in jobs
    ]
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    environment.pop("HF_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(script=script)],
        input=json.dumps(trees),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


PROGRAM = """
import json, sys
from millrace import hub
from millrace.errors import MillraceError
from millrace.spec import parse
from millrace.admission import submission

told = []
for tree in json.load(sys.stdin):
    try:
        spec = parse(tree)
        told.append({script})
    except MillraceError as error:
        told.append(dict(type=type(error).__name__, what=error.what, fix=error.fix))
assert not set(["torch", "transformers"]) & set(sys.modules)
print(json.dumps(told))
"""


CHECK = "submission.check(tree).model_dump(mode='json')"


def test_names_are_pinned_and_only_small_files_come_with_the_submission(hub: Hub, tmp_path: Path) -> None:
    spec = asked(CHECK, hub, tmp_path)
    assert spec["model"]["path"] == PINNED["model"] and spec["data"]["files"] == [PINNED["data"]]
    assert {"config.json", "tokenizer.json", "train.jsonl"} <= set(hub.downloads())
    assert "model.safetensors" not in hub.downloads() and not [asked for asked in hub.requests if "onnx" in asked]


def test_every_service_reads_the_pinned_commit_and_downloads_it_once(hub: Hub, tmp_path: Path) -> None:
    load = "hub.local(spec, weights=True, data=True).model_dump(mode='json')"
    asked(CHECK, hub, tmp_path)
    hub.repositories["models/someone/tiny"].branches["main"] = LATER
    here = asked(load, hub, tmp_path, PINNED)
    folder, file = Path(here["model"]["path"]), Path(here["data"]["files"][0])
    assert folder.name == COMMIT and json.loads(file.read_text()) == ROW
    assert (folder / "model.safetensors").stat().st_size > 1000 and not (folder / "onnx").exists()
    assert len(hub.downloads()) == len(set(hub.downloads()))
    before = hub.downloads()
    assert asked(load, hub, tmp_path, PINNED, offline=True) == here
    assert hub.downloads() == before


def test_one_data_file_is_downloaded_by_its_name(hub: Hub, tmp_path: Path) -> None:
    script = f"open(hub.file_here({DATA!r}, 'source')).read()"
    assert [json.loads(asked(script, hub, tmp_path)) for _ in range(2)] == [ROW, ROW]
    assert hub.downloads() == ["train.jsonl"]
    missing = asked("hub.file_here('hf://datasets/someone/sums/none.jsonl', 'source')", hub, tmp_path)
    assert missing["type"] == "InvalidJob" and "the data set has no such file" in missing["what"]


def test_a_revision_may_be_named(hub: Hub, tmp_path: Path) -> None:
    spec = asked("hub.pinned(spec).model.path", hub, tmp_path, {"model": "someone/tiny@v2"})
    assert spec == f"hf://someone/tiny@{LATER}"
    assert asked("hub.pinned(spec).model.path", hub, tmp_path, PINNED, offline=True) == PINNED["model"]


REFUSED = [
    ({"model": "someone/nothing"}, "model.path", "no such model, or it is private", "HF_TOKEN"),
    ({"model": "someone/gated"}, "model.path", "is gated", "ask for access"),
    ({"model": "someone/tiny@v3"}, "model.path", "no such revision", "a branch, a tag or a commit"),
    ({"model": "someone/pickled"}, "model.path", "no weights in *.safetensors", "safetensors"),
    ({"model": "hf://someone/tiny/config.json"}, "model.path", "not the name of a model", "owner/name"),
    ({"data": "hf://datasets/someone/other/a.jsonl"}, "data.files", "no such data set", "HF_TOKEN"),
    ({"data": "hf://datasets/someone/sums/a.jsonl"}, "data.files", "no such file", "page of its files"),
    ({"data": "hf://datasets/someone/sums"}, "data.files", "not the name of a file", "hf://datasets/owner/name/file"),
]


def test_what_the_hub_does_not_give_is_refused_with_the_reason(hub: Hub, tmp_path: Path) -> None:
    answers = asked_of([changes for changes, *_ in REFUSED], CHECK, hub, tmp_path)
    for told, (_, name, reason, fix) in zip(answers, REFUSED, strict=True):
        assert told["type"] == "InvalidJob" and told["what"].startswith(f"{name}: "), told
        assert reason in told["what"] and fix in told["fix"], told


@pytest.mark.parametrize("offline", [True, False])
def test_no_way_to_the_hub_is_said_at_submission(tmp_path: Path, offline: bool) -> None:
    """By intention, and because nothing listens there."""
    nobody = Hub(endpoint="http://127.0.0.1:9")
    told = asked(CHECK, nobody, tmp_path, offline=offline)
    assert told["type"] == "InvalidJob" and told["what"].startswith("model.path: hf://someone/tiny: ")
    assert "cannot be reached" in told["what"] and "hf download someone/tiny" in told["fix"]


def test_a_service_that_cannot_reach_the_hub_may_be_asked_again(tmp_path: Path) -> None:
    told = asked("hub.local(spec)", Hub(endpoint="http://127.0.0.1:9"), tmp_path, PINNED, offline=True)
    assert told["type"] == "Unavailable"


NAMES = [
    ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", None)),
    ("Qwen/Qwen3-0.6B@main", HubName("Qwen/Qwen3-0.6B", "main")),
    ("hf://Qwen/Qwen3-0.6B@refs%2Fpr%2F1", HubName("Qwen/Qwen3-0.6B", "refs/pr/1")),
    ("hf://models/Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", None)),
    ("/data/models/Qwen3", None),
    ("data/models/Qwen3", None),
    ("./Qwen/Qwen3", None),
    ("../Qwen3", None),
    ("~/Qwen3", None),
    ("Qwen3", None),
]


def test_a_full_cache_is_named_and_room_again_lets_it_go_on(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    load = "hub.local(spec, weights=True, data=True).model_dump(mode='json')"
    home = tmp_path / "small"
    with small_disk(home, 1):
        taken = home / "taken"
        taken.write_bytes(bytes((1 << 20) - len(files["model.safetensors"]) // 2))
        full = asked(load, hub, home, {"model": PINNED["model"]})
        cache = f"cache of this host, {home}/hub: No space left on device"
        assert full["what"] == f"model.path: {PINNED['model']}: it could not be written to the {cache}."
        assert full["type"] == "Unavailable" and "HF_HOME" in full["fix"]
        taken.unlink()
        there = asked(load, hub, home, {"model": PINNED["model"]})
        assert (Path(there["model"]["path"]) / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize(("text", "name"), NAMES)
def test_names_of_models_and_paths_are_told_apart(text: str, name: HubName | None) -> None:
    found = HubName.of_model(text, "model.path")
    assert found == name
    assert found is None or HubName.of_model(str(found), "model.path") == found


def test_a_folder_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert HubName.of_model("models/mine", "model.path") is None


def test_names_of_files_keep_their_form() -> None:
    name = HubName.of_file("hf://datasets/openai/gsm8k@v1/main/train.parquet", "data.files")
    assert name == HubName("openai/gsm8k", "v1", "main/train.parquet")
    assert str(name) == "hf://datasets/openai/gsm8k@v1/main/train.parquet"
    assert HubName.of_file("/data/train.parquet", "data.files") is None
    with pytest.raises(InvalidJob, match="not the name of a file"):
        HubName.of_file("hf://openai/gsm8k/main/train.parquet", "data.files")
