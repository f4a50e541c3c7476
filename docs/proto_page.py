"""Makes the page on the gRPC contracts, for the site: `make docs`, or `python docs/proto_page.py` to read it.

It comes from the files in `proto/millrace/v1` and their comments.
"""

import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from millrace.wire.deadlines import DEADLINES_S

ROOT = pathlib.Path(__file__).resolve().parent.parent
WELL_KNOWN = pathlib.Path(grpc_tools.__file__).parent / "_proto"
INTRODUCTION = """# gRPC contracts

This page comes from `proto/millrace/v1`.

The services call each other by these contracts. Every call carries the token that they share as the metadata
`authorization: Bearer TOKEN`, and has a deadline; a job's `deadlines` replace some of them. Errors are gRPC statuses
with the name of Millrace's error. Numbers of removed fields are reserved, and a field of a release keeps its meaning
([CONTRIBUTING](../CONTRIBUTING.md#contracts)). A field that is not sent has the value 0, false or an empty text."""
SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
Comments = Mapping[tuple[int, ...], str]
FILE_SYNTAX = 12
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, ENUM_VALUE, SERVICE_METHOD = 2, 3, 2, 2
"""Numbers of these parts in descriptor.proto: a path to a comment is made of them and of indexes."""


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for file in _files():
        parts += _file(file)
    return "\n\n".join(parts) + "\n"


def _files() -> list[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch, "descriptors")
        protos = sorted(str(path) for path in (ROOT / "proto/millrace/v1").glob("*.proto"))
        options = [f"-I{ROOT / 'proto'}", f"-I{WELL_KNOWN}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, *protos]):
            raise SystemExit("protoc failed: its message is above")
        return sorted(FileDescriptorSet.FromString(out.read_bytes()).file, key=lambda file: file.name)


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = _comments(file)
    yield f"## {pathlib.PurePath(file.name).name}"
    yield comments.get((FILE_SYNTAX,), "")
    for number, service in enumerate(file.service):
        yield from _service(service, (FILE_SERVICE, number), comments)
    for number, message in enumerate(file.message_type):
        yield from _message(message, (FILE_MESSAGE, number), comments)
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, (FILE_ENUM, number), comments)


def _comments(file: FileDescriptorProto) -> Comments:
    """The comment of each part of a file, by its path, on one line."""
    return {
        tuple(place.path): " ".join((place.leading_comments + place.trailing_comments).split())
        for place in file.source_code_info.location
    }


def _service(service: ServiceDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {service.name}"
    if text := comments.get(path):
        yield text
    rows = []
    for number, method in enumerate(service.method):
        answer = ("stream of " if method.server_streaming else "") + _linked(method.output_type)
        deadline = f"{DEADLINES_S[f'{service.name}/{method.name}']:g} s"
        text = comments.get((*path, SERVICE_METHOD, number), "")
        rows.append((f"`{method.name}`", f"{_linked(method.input_type)} → {answer}", deadline, text))
    yield _table(("method", "request → answer", "deadline", "what it does"), rows)


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {message.name}"
    if text := comments.get(path):
        yield text
    if not message.field:
        yield "It has no fields."
        return
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = []
    for number, field in enumerate(message.field):
        text = comments.get((*path, MESSAGE_FIELD, number), "")
        rows.append((str(field.number), f"`{field.name}`", _type(message, field, maps), text))
    yield _table(("number", "field", "type", "meaning"), rows)


def _type(message: DescriptorProto, field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    if entry := maps.get(field.type_name.rpartition(".")[2]):
        key, value = (_plain(part) for part in entry.field)
        return f"map of {key} to {value}"
    plain = _plain(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {plain}"
    if field.proto3_optional:
        return f"{plain}, optional"
    return f"{plain}, one of `{message.oneof_decl[field.oneof_index].name}`" if field.HasField("oneof_index") else plain


def _plain(field: FieldDescriptorProto) -> str:
    return SCALARS.get(field.type) or _linked(field.type_name)


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {enum.name}"
    if text := comments.get(path):
        yield text
    rows = [
        (str(value.number), f"`{value.name}`", comments.get((*path, ENUM_VALUE, number), ""))
        for number, value in enumerate(enum.value)
    ]
    yield _table(("number", "value", "meaning"), rows)


def _linked(type_name: str) -> str:
    """A message or enum as a link to its section."""
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


PAGES = {"proto.md": page}

if __name__ == "__main__":
    sys.stdout.write(page())
