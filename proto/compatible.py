"""Compares the contracts with the last released ones: `python proto/compatible.py`, part of `make lint`.

A released field keeps its number, name, type and cardinality, or its number and name are reserved; a released enum
value keeps its number; a released method keeps its request, its reply and whether it streams. `--release` writes the
contracts as they are now to proto/released.txtpb, as a new baseline: only with a raised PROTOCOL_VERSION, or where
nothing breaks.
"""

import importlib
import pathlib
import sys
from collections.abc import Iterator

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASED = ROOT / "proto" / "released.txtpb"
FILES = ("common", "fleet", "rollout", "trainer", "weights", "work")


def current() -> FileDescriptorSet:
    """The contracts as the generated stubs hold them."""
    files = FileDescriptorSet()
    for name in FILES:
        importlib.import_module(f"millrace.wire.v1.{name}_pb2").DESCRIPTOR.CopyToProto(files.file.add())
    return files


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


def _pairs(old: list, new: list) -> Iterator[tuple]:
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
    for method, now in _pairs(list(old.method), [] if new is None else list(new.method)):
        if now is None:
            yield f"{old.name}.{method.name} is gone"
        elif (now.input_type, now.output_type, now.server_streaming, now.client_streaming) != (
            (method.input_type, method.output_type, method.server_streaming, method.client_streaming)
        ):
            yield f"{old.name}.{method.name} changed its request, reply or streaming"


def main() -> None:
    if "--release" in sys.argv:
        RELEASED.write_text(text_format.MessageToString(current()))
        return
    if not RELEASED.exists():
        print("no released contracts to compare with yet")
        return
    if broken := list(breaks(text_format.Parse(RELEASED.read_text(), FileDescriptorSet()), current())):
        raise SystemExit("these changes break released peers:\n  " + "\n  ".join(broken))


if __name__ == "__main__":
    main()
