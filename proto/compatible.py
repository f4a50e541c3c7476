"""Compares the contracts with those of every release: `python proto/compatible.py`, part of `make lint`.

The .proto files of each release are frozen under proto/released/<release>/, with the PROTOCOL_VERSION that they had and
the schema of job specs.
Releases of the current PROTOCOL_VERSION must still be understood: a released field keeps its number, name, type and
cardinality, or its number and name are reserved; a released enum value keeps its number; a released method keeps its
request, its reply and whether it streams. Members of another PROTOCOL_VERSION are refused, so older ones are skipped.

`--release 0.2` freezes the contracts as they are now under that name.
"""

import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import TypeVar

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from millrace.spec import JobSpec
from millrace.wire.channel import PROTOCOL_VERSION

PROTO = pathlib.Path(__file__).resolve().parent
RELEASED = PROTO / "released"
VERSION_FILE = "protocol_version"
SPEC_FILE, JOB_FILE = "job.schema.json", "job.json"
"""What the members of a release take as a job spec, and a job as it stores it: tests/spec/test_released_specs.py."""
FIRST = RELEASED / "0.1"
"""Its job is stored again for each later release."""
WELL_KNOWN = pathlib.Path(grpc_tools.__file__).parent / "_proto"
Named = TypeVar("Named", DescriptorProto, EnumDescriptorProto, ServiceDescriptorProto, MethodDescriptorProto)


def contracts(folder: pathlib.Path) -> FileDescriptorSet:
    """The compiled .proto files of `folder`/millrace/v1."""
    with tempfile.TemporaryDirectory() as scratch:
        output = pathlib.Path(scratch, "descriptors")
        files = sorted(str(path) for path in (folder / "millrace/v1").glob("*.proto"))
        if protoc.main(["protoc", f"-I{folder}", f"-I{WELL_KNOWN}", f"--descriptor_set_out={output}", *files]):
            raise SystemExit("protoc failed: its message is above")
        return FileDescriptorSet.FromString(output.read_bytes())


def released(protocol_version: int) -> Iterator[pathlib.Path]:
    """Folders of the releases that speak `protocol_version`."""
    for folder in sorted(RELEASED.iterdir()):
        if int((folder / VERSION_FILE).read_text()) == protocol_version:
            yield folder


def freeze(release: str) -> None:
    """Copies the contracts of today to proto/released/`release`."""
    folder = RELEASED / release
    if folder.exists():
        raise SystemExit(f"{folder} is frozen already. Fix: choose the next release's name.")
    shutil.copytree(PROTO / "millrace", folder / "millrace")
    (folder / VERSION_FILE).write_text(f"{PROTOCOL_VERSION}\n")
    (folder / SPEC_FILE).write_text(json.dumps(JobSpec.model_json_schema(), indent=1) + "\n")
    stored = JobSpec.model_validate_json((FIRST / JOB_FILE).read_text())
    (folder / JOB_FILE).write_text(stored.model_dump_json(indent=1) + "\n")


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    """Every change from `old` to `new` that a peer of the older release would not survive."""
    files = {f.name: f for f in new.file}
    for released in old.file:
        if released.name not in files:
            yield f"{released.name} is gone"
        else:
            yield from _file(released, files[released.name])


def _file(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    for messages in _pairs(old.message_type, new.message_type):
        yield from _message(*messages)
    for enums in _pairs(old.enum_type, new.enum_type):
        yield from _enum(*enums)
    for services in _pairs(old.service, new.service):
        yield from _service(*services)


def _pairs(old: Iterable[Named], new: Iterable[Named]) -> Iterator[tuple[Named, Named | None]]:
    there = {item.name: item for item in new}
    return ((item, there.get(item.name)) for item in old)


def _message(old: DescriptorProto, new: DescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"message {old.name} is gone"
        return
    fields = {f.number: f for f in new.field}
    for field in old.field:
        where = f"{old.name}.{field.name} = {field.number}"
        now = fields.get(field.number)
        if now is None:
            reserved = any(r.start <= field.number < r.end for r in new.reserved_range)
            if not (reserved and field.name in new.reserved_name):
                yield f"{where} is gone and its number and name are not reserved"
        elif (now.name, now.type, now.type_name, now.label) != (field.name, field.type, field.type_name, field.label):
            yield f"{where} changed its name, type or cardinality"


def _enum(old: EnumDescriptorProto, new: EnumDescriptorProto | None) -> Iterator[str]:
    values = {} if new is None else {v.number: v.name for v in new.value}
    for value in old.value:
        if values.get(value.number) != value.name:
            yield f"enum {old.name}: {value.name} = {value.number} is gone or changed"


def _service(old: ServiceDescriptorProto, new: ServiceDescriptorProto | None) -> Iterator[str]:
    for method, now in _pairs(old.method, [] if new is None else new.method):
        if now is None:
            yield f"{old.name}.{method.name} is gone"
        elif (now.input_type, now.output_type, now.server_streaming, now.client_streaming) != (
            (method.input_type, method.output_type, method.server_streaming, method.client_streaming)
        ):
            yield f"{old.name}.{method.name} changed its request, reply or streaming"


def main() -> None:
    if "--release" in sys.argv:
        freeze(sys.argv[sys.argv.index("--release") + 1])
        return
    now = contracts(PROTO)
    broken = [
        f"{folder.name}: {change}" for folder in released(PROTOCOL_VERSION) for change in breaks(contracts(folder), now)
    ]
    if broken:
        fix = "Fix: reserve the number and the name, or raise PROTOCOL_VERSION in millrace/wire/channel.py."
        raise SystemExit("these changes break released peers:\n  " + "\n  ".join([*broken, fix]))


if __name__ == "__main__":
    main()
