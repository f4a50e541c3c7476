import importlib.util
import pathlib

import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorSet

import millrace

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("compatible", ROOT / "proto/compatible.py")
compatible = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compatible)


@pytest.fixture(scope="module")
def now() -> FileDescriptorSet:
    return compatible.contracts(compatible.PROTO)


@pytest.fixture
def changed(now: FileDescriptorSet) -> FileDescriptorSet:
    files = FileDescriptorSet()
    files.CopyFrom(now)
    return files


def find(files, kind, name):
    return next(item for file in files.file for item in getattr(file, kind) if item.name == name)


def test_what_is_added_breaks_nothing(now, changed):
    find(changed, "message_type", "Trajectory").field.add(name="note", number=100, type=9, label=1)
    find(changed, "service", "Work").method.add(name="Peek", input_type=".a", output_type=".b")
    assert list(compatible.breaks(now, changed)) == []


def test_a_field_that_is_gone_must_be_reserved(now, changed):
    message = find(changed, "message_type", "Trajectory")
    del message.field[0]
    assert "Trajectory.tokens = 1 is gone" in next(compatible.breaks(now, changed))
    message.reserved_range.add(start=1, end=2)
    message.reserved_name.append("tokens")
    assert list(compatible.breaks(now, changed)) == []


@pytest.mark.parametrize("attribute, value", [("name", "other"), ("type", 5), ("label", 3)])
def test_a_changed_field_breaks(now, changed, attribute, value):
    setattr(find(changed, "message_type", "Trajectory").field[1], attribute, value)
    assert "Trajectory.logprobs = 2 changed" in next(compatible.breaks(now, changed))


def test_a_changed_enum_value_or_method_breaks(now, changed):
    find(changed, "enum_type", "StopReason").value[1].number = 9
    find(changed, "service", "Work").method[0].server_streaming = True
    told = list(compatible.breaks(now, changed))
    assert any("STOP_REASON_END_OF_TURN = 1 is gone" in line for line in told)
    assert any("Work.Lease changed" in line for line in told)


def test_the_contracts_understand_every_release_of_their_protocol_version(now):
    folders = list(compatible.released(compatible.PROTOCOL_VERSION))
    assert next(folder.name for folder in folders) == "0.1"
    assert [change for folder in folders for change in compatible.breaks(compatible.contracts(folder), now)] == []


def test_this_release_is_frozen_under_its_name():
    """`make lint` and this file then find what a later change breaks: gone, with another number, of another type."""
    folder = compatible.RELEASED / millrace.__version__.rpartition(".")[0]
    assert folder in list(compatible.released(compatible.PROTOCOL_VERSION))
    assert f'version = "{millrace.__version__}"' in (ROOT / "pyproject.toml").read_text()
    chart = yaml.safe_load((ROOT / "deploy/helm/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == millrace.__version__
    assert f"\n## {millrace.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_releases_of_another_protocol_version_are_skipped():
    assert list(compatible.released(compatible.PROTOCOL_VERSION + 1)) == []


def test_a_release_is_frozen_once(tmp_path, monkeypatch):
    monkeypatch.setattr(compatible, "RELEASED", tmp_path)
    compatible.freeze("0.9")
    assert list(compatible.breaks(compatible.contracts(tmp_path / "0.9"), compatible.contracts(compatible.PROTO))) == []
    with pytest.raises(SystemExit, match="frozen already"):
        compatible.freeze("0.9")
